"""The tensors of a model, as closed forms need them: names, shapes and dtypes, whatever they come from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import field, replace
from functools import cached_property, wraps
from math import prod
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import pydantic

from harness.backends.base import Precision
from harness.bounds import LARGEST_NUMBER

DTYPE_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2,
    "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "none": 0,
}  # fmt: skip
"""Per element; 'none' is the dtype of a barrier."""


def element_bytes(dtype: str) -> int | None:
    """Also of dtypes that no closed form knows; None: unknown."""
    return 1 if dtype.startswith("float8") else DTYPE_BYTES.get(dtype.removeprefix("u"))


COMPUTE: dict[Precision, str] = {
    "fp32": "float32", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "bf16": "bfloat16",
}  # fmt: skip
"""Dtype of matrix products at each precision."""


STORED = pydantic.ConfigDict(extra="forbid")
"""Of what records hold too."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
READ_ELSEWHERE: Final = "read by another module"
RETURNED: Final = "returned by its module"
Use = Literal[
    "inputs with gradient",
    "inputs without gradient",
    "forward only",
    "earlier run of its module",
    "read by another module",
    "returned by its module",
]
"""One run of a module in a forward pass, by what the backward pass sees of it; forward only: nothing; an
earlier run: as with gradient, but the module runs again in this pass; read by another module: a gradient
comes although its own module does not run, or another module returns it; returned: its module returns it
as it is, to another or to the loss."""
UnitCall = tuple[str, Use]
"""One run of a block, or of the whole model, whose name is ''."""


def _has_a_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    if min(shape, default=0) < 0 or prod(shape) > LARGEST_NUMBER:
        raise ValueError("no tensor has these sizes")
    return shape


@pydantic.dataclasses.dataclass(frozen=True, config=STORED)
class Tensor:
    """A tensor of the model: a parameter or a buffer."""

    name: str
    """Its name in the model."""
    shape: Annotated[tuple[int, ...], pydantic.AfterValidator(_has_a_size)]
    """Sizes of its dimensions."""
    dtype: str
    """Its dtype, such as 'float32'."""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @cached_property
    def rows(self) -> tuple[int, int]:
        """Rows along the first dimension, and elements of one row."""
        return (self.shape[0], prod(self.shape[1:])) if self.shape else (1, 1)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STORED)
class Attention:
    """Heads of a decoder, alike in all of its blocks."""

    layers: int
    """Number of transformer blocks."""
    heads: int
    """Heads of queries."""
    key_value_heads: int
    """Heads of keys and values."""
    head_size: int
    """Elements of a token in one head."""


class Derivations:
    """What follows from an object that does not change, derived when it is asked for the first time."""

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, derive: Callable[[], T]) -> T:
        """What follows from this object and `key` alone."""
        if key not in self._derived:
            self._derived[key] = derive()
        found: T = self._derived[key]
        return found


def derived(derive: F) -> F:
    """`derive`, whose first argument has Derivations, worked out once for that object and the others."""
    name = f"{derive.__module__}.{derive.__qualname__}"

    @wraps(derive)
    def once(of: Derivations, *others: Hashable) -> Any:
        return of.once((name, *others), lambda: derive(of, *others))

    return cast("F", once)


Names = Annotated[frozenset[str], pydantic.PlainSerializer(sorted, return_type=list[str])]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STORED)
class Layout(Derivations):
    """What closed forms need to know of the model, as it was before a library touched it."""

    parameters: tuple[Tensor, ...]
    """In the model's order; a tied tensor comes once, under its first name."""
    decaying: Names
    """Names of the parameters that decay: the optimizer has one group of them and one of the rest."""
    groups: tuple[Names, ...] = ()
    """Names of the parameters of each group of the optimizer, where the job says more of them than what
    decays; any may be empty."""
    buffers: tuple[Tensor, ...] = ()
    blocks: tuple[str, ...] = ()
    """Names of the transformer blocks, each of which is wrapped as one unit."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further name of a tied parameter -> the name under which it stands above."""
    frozen: Names = frozenset()
    """Names of the parameters that the job does not train."""
    without_gradient: Names | None = frozenset()
    """Names of the modules that run and that no gradient comes back to; None: not known."""
    attention: Attention | None = None
    """None: the model does not say its heads, or the record is older."""
    uses: dict[str, tuple[Use, ...]] | None = field(default_factory=dict)
    """Parameters that several modules share, or whose module does not run once in a forward pass -> their
    uses in its order; None: not known."""
    unreached: Names | None = frozenset()
    """Names of the trained parameters that no gradient reaches, by a step on the meta device; None: not
    known."""
    unit_calls: tuple[UnitCall, ...] | None = ()
    """Runs of the blocks and of the whole model, whose name is '', in the order in which they begin; (): each
    runs once and has a backward pass; None: not known."""
    read_outside: Names | None = frozenset()
    """Names of the parameters that the loss reads while no module runs, such as for a penalty; None: not
    known."""
    changed_in_passes: Names | None = frozenset()
    """Names of the parameters that forward passes of training write to in place, as to clamp them; None: not
    known."""
    evaluates_alike: bool | None = True
    """Whether an evaluation runs the same modules in the same order; None: not known."""
    depends_on_data: Annotated[bool, pydantic.Field(exclude_if=lambda value: not value)] = False
    """Whether values or random numbers may decide what a step runs: bytes of the steps are not judged where
    they hang on that."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _untraced(cls, values: Any) -> Any:
        """A record from before gradients were traced knows neither, unless each of its modules runs once."""
        if isinstance(values, dict) and values.get("uses", {}) != {}:
            return {"unreached": None, "unit_calls": None, **values}
        return values

    @cached_property
    def parameter_count(self) -> int:
        return elements(self.parameters)

    def in_dtype(self, dtype: str) -> Layout:
        """With parameters and floating-point buffers in another dtype, as `nn.Module.to` makes it."""
        return replace(
            self,
            parameters=tuple(replace(tensor, dtype=dtype) for tensor in self.parameters),
            buffers=tuple(
                replace(tensor, dtype=dtype) if "float" in tensor.dtype else tensor for tensor in self.buffers
            ),
        )

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """Parameters that the optimizer is given, in the model's order."""
        return tuple(tensor for tensor in self.parameters if tensor.name not in self.frozen)

    @cached_property
    def trained_count(self) -> int:
        return elements(self.trained)

    @cached_property
    def reached(self) -> tuple[Tensor, ...]:
        """Parameters that are trained and get a gradient, in the model's order."""
        return tuple(tensor for tensor in self.parameters if self.is_reached(tensor))

    @cached_property
    def frozen_parameters(self) -> tuple[Tensor, ...]:
        """Parameters that no optimizer updates, in the model's order."""
        return tuple(tensor for tensor in self.parameters if tensor.name in self.frozen)

    def is_frozen(self, tensor: Tensor) -> bool:
        return tensor.name in self.frozen

    def is_reached(self, tensor: Tensor) -> bool:
        """Whether a parameter is trained and gets a gradient."""
        return tensor.name not in self.frozen and tensor.name not in (self.unreached or ())

    def update_groups(self) -> list[list[Tensor]]:
        """Parameters by optimizer group, in their order; empty groups are left out."""
        return [list(group) for group in self._groups]

    def reached_groups(self) -> list[list[Tensor]]:
        """Parameters that get a gradient, by optimizer group."""
        return [list(filter(self.is_reached, group)) for group in self._groups]

    def units(self) -> list[tuple[str, list[Tensor]]]:
        """Parameters by wrap unit: one per block, and '' for the rest; empty units are left out."""
        return [(name, list(tensors)) for name, tensors in self._units]

    @cached_property
    def _groups(self) -> list[list[Tensor]]:
        every = frozenset(tensor.name for tensor in self.trained)
        parts = self.groups or (self.decaying, every - self.decaying)
        groups = [[tensor for tensor in self.trained if tensor.name in part] for part in parts]
        return [group for group in groups if group]

    @cached_property
    def _units(self) -> list[tuple[str, list[Tensor]]]:
        units: dict[str, list[Tensor]] = {name: [] for name in (*self.blocks, "")}
        depths = sorted({name.count(".") + 1 for name in self.blocks})
        for tensor in self.parameters:
            parts = tensor.name.split(".")
            outer = (".".join(parts[:depth]) for depth in depths if depth < len(parts))
            units[next((name for name in outer if name in units), "")].append(tensor)
        return [(name, tensors) for name, tensors in units.items() if tensors]


def elements(tensors: Iterable[Tensor]) -> int:
    """Elements of several tensors."""
    return sum(tensor.numel for tensor in tensors)


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple
