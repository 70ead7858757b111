"""A live model: its parameters whatever wraps or cuts it, which modules run, in which mode and how often."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from harness.backends.model.precision import dtype_name
from harness.nested import grouped

NO_BACKWARD = -1
"""What torch says of the backward pass that this thread is in if it is in none."""


def in_backward() -> bool:
    """Whether this thread is in a backward pass, as in a hook of it or a recomputation."""
    return bool(torch._C._current_graph_task_id() != NO_BACKWARD)


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One parameter of the whole model, under one of its names."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    trains: bool
    held: Tensor
    """What the live model has of it; of flat parameters the tensor that holds several."""
    key: tuple[int, str]
    """Equal for the names of one tied parameter."""


def bare_name(name: str) -> str:
    """A parameter's name without what wrapping modules put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def bare_module_name(name: str) -> str:
    """A module's name without what wrapping modules put into it, which may be a wrapper itself."""
    return bare_name(f"{name}.").removesuffix(".")


def whole_parameters(module: nn.Module) -> list[Whole]:
    """Every name of every parameter; FSDP1 without original parameters shows flat ones in their place."""
    shapes = _flat_shapes(module)
    found: list[Whole] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if getattr(parameter, "_is_flat_param", False):
            prefix = bare_name(name.removesuffix("_flat_param"))
            found += _originals(prefix, parameter)
            continue
        bare = bare_name(name)
        shape = shapes.get(bare) or list(getattr(parameter, "ds_shape", parameter.shape))
        found.append(_whole(bare, shape, parameter, (id(parameter), "")))
    return found


def recomputes(module: nn.Module) -> bool:
    """Whether a part of the model recomputes its activations."""
    return any(
        getattr(m, "gradient_checkpointing", False) is True or type(m).__name__ == "CheckpointWrapper"
        for m in module.modules()
    )


def _originals(prefix: str, flat: Tensor) -> Iterator[Whole]:
    """Parameters in a flat one; what other modules share with them under their names too."""
    pairs = list(zip(flat._fqns, flat._shapes, strict=True))  # type: ignore[attr-defined]
    first = {}
    infos = flat._param_infos  # type: ignore[attr-defined]
    for info, (name, shape) in zip(infos, pairs, strict=True):
        bare = prefix + bare_name(name)
        first[id(info.module), info.param_name] = (bare, list(shape))
        yield _whole(bare, list(shape), flat, (id(flat), bare))
    for shared in flat._shared_param_infos:  # type: ignore[attr-defined]
        bare, shape = first[id(shared.prim_module), shared.prim_param_name]
        module = bare_name(f"{shared.module_name}.") if shared.module_name else ""
        yield _whole(prefix + module + shared.param_name, shape, flat, (id(flat), bare))


def _flat_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Shapes of original parameters that views of flat ones stand for, by name."""
    shapes: dict[str, list[int]] = {}
    for name, unit in module.named_modules():
        flat = getattr(unit, "_flat_param", None)
        if isinstance(flat, Tensor):
            prefix = bare_name(f"{name}.") if name else ""
            for own, shape in zip(flat._fqns, flat._shapes, strict=True):  # type: ignore[attr-defined]
                shapes[prefix + bare_name(own)] = list(shape)
    return shapes


def _whole(name: str, shape: list[int], held: Tensor, key: tuple[int, str]) -> Whole:
    return Whole(name=name, shape=shape, dtype=held.dtype, trains=held.requires_grad, held=held, key=key)


OF_HEADS = ("summary_", "classifier_", "cls_")
"""Begin settings of heads that a model may not have; one that it has holds a module."""


def largest_dropout(model: nn.Module, resting: Collection[str] = ()) -> float:
    """Largest probability of a dropout that works in training. resting: modules that no training pass trains.

    That of a module, one that a module keeps as a number (attention kernels take it), or one that a Hugging
    Face configuration names and no module keeps, at any depth of what wraps the model.
    """
    return max(_probabilities(model, resting), default=0.0)


def _probabilities(model: nn.Module, resting: Collection[str]) -> Iterator[float]:
    configured: dict[int, Mapping[str, Any]] = {}
    kept: set[str] = set()
    for name, module in model.named_modules():
        works = bare_module_name(name) not in resting
        if works and isinstance(module, nn.modules.dropout._DropoutNd):
            yield float(module.p)
        # Not by getattr: FSDP1 and torch.compile have the attributes of what they wrap.
        for key, probability in _named(vars(module)):
            kept.add(key)
            yield probability if works else 0.0
        config: Any = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) not in configured and not _rests(name, module, resting):
            configured[id(config)] = config.to_dict()
    for values in configured.values():
        yield from (probability for key, probability in _named(values) if key not in kept)


def _rests(name: str, module: nn.Module, resting: Collection[str]) -> bool:
    """Whether a module has dropouts, none of which works."""
    prefix = f"{name}." if name else ""
    own = [
        bare_module_name(prefix + of)
        for of, part in module.named_modules()
        if of and isinstance(part, nn.modules.dropout._DropoutNd)
    ]
    return bool(own) and all(one in resting for one in own)


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith(OF_HEADS):
            continue
        if "dropout" in key or key.endswith("pdrop"):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
                yield key, float(value)


PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MOST_PRODUCTS = 1000
"""Layers of another dtype than most that are named."""
MOST_NAMES = 20_000
"""After so many, what changes from step to step, as with experts, is no longer noted."""


class ModuleWatch:
    """Looks on between `start` and `stop` in the first steps; gradients are noted for as long as they can be.

    Libraries put tensors of their own in the place of parameters while a module runs, so those are noted that
    stand there then. What is the same tensor in two steps keeps its note in all that follow: one call of
    Python per parameter and backward pass.
    """

    def __init__(self, model: nn.Module, ran: Callable[[str], None] = lambda _: None) -> None:
        """ran: told of each module with parameters, the model itself left out, as it begins."""
        self._model, self._ran = model, ran
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._trained = frozenset(names.values())
        self._own: dict[nn.Module, list[tuple[str, str]]] = {}
        for module in model.modules():
            own = module.named_parameters(recurse=False)
            self._own[module] = [(local, names[id(p)]) for local, p in own if id(p) in names]
        self._products: dict[nn.Module, str] = {
            m: name for name, m in model.named_modules() if isinstance(m, PRODUCTS)
        }
        self._dtypes: Counter[str] = Counter()
        self._dtype_of: dict[nn.Module, str] = {}
        self._reached: set[str] = set()
        self._noted: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._lasting: set[str] = set()
        self._new: set[str] = set()
        self._handles: list[Any] = []
        self._notes: list[Any] = []
        self._told: list[str] | None = None
        self._left = MOST_NAMES
        self.is_over = False
        """Whether it is no longer known which parameters have a gradient."""

    @property
    def compute_dtype(self) -> str | None:
        """Dtype of most outputs of linear layers and convolutions; None: none ran."""
        return self._dtypes.most_common(1)[0][0] if self._dtypes else None

    @property
    def products_otherwise(self) -> dict[str, list[str]]:
        """Layers whose outputs had another dtype than `compute_dtype`, by that dtype."""
        found = grouped(
            (dtype, bare_module_name(self._products[module]))
            for module, dtype in self._dtype_of.items()
            if dtype != self.compute_dtype
        )
        return {dtype: sorted(names)[:MOST_PRODUCTS] for dtype, names in found.items()}

    def start(self) -> None:
        """Look on from here, unless it does."""
        if self._handles:
            return
        for module, own in self._own.items():
            if own:
                self._handles.append(module.register_forward_pre_hook(self._before(own)))
        # Before the hooks of libraries, which gather weights there; FSDP1 put wrappers into the model.
        for name, module in self._model.named_modules():
            if name and any(True for _ in module.parameters()):

                def begins(*_: Any, bare: str = bare_module_name(name)) -> None:
                    self._ran(bare)

                self._handles.append(module.register_forward_pre_hook(begins, prepend=True))
        for module in self._products:
            self._handles.append(module.register_forward_hook(self._product))

    def stop(self) -> None:
        """Look on no further; what lasts stays noted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> list[str] | None:
        """Names of trained parameters to which no gradient came; None: as before, or it is not known."""
        self._new.clear()
        if self.is_over or not (self._reached or self._lasting or self._told is not None):
            return None
        known = self._trained if self._handles else self._lasting
        missing = sorted((known - self._reached) | (set(self._told or ()) - known))
        self._reached.clear()
        if not known or len(missing) > self._left:
            self.is_over = True
            for note in self._notes:
                note.remove()
            self._notes.clear()
            return None
        if missing == self._told:
            return None
        self._told, self._left = missing, self._left - len(missing)
        return missing

    def _before(self, own: list[tuple[str, str]]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            for local, name in own:
                tensor = getattr(module, local, None)
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if self._noted.get(name) is tensor:
                    if name not in self._new:
                        self._lasting.add(name)
                    continue
                self._lasting.discard(name)
                note = tensor.register_hook(lambda _, name=name: self._reached.add(name))
                if tensor.is_leaf:
                    self._noted[name] = tensor
                    self._new.add(name)
                    self._notes.append(note)

        return hook

    def _product(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtype = self._dtype_of[module] = dtype_name(output.dtype)
            self._dtypes[dtype] += 1


MOST_IN_OTHER_MODE = 1000
"""Of modules in another mode than their pass, the record keeps this many."""


class PassWatch:
    """Counts calls of the bare model, and backward passes that reach the loss of a batch.

    What recomputes activations calls blocks and not the model, so it does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._passes = [0, 0]
        self._gradients: list[Tensor] = []
        self._modes: dict[tuple[bool, bool], list[str]] = {}
        passes = self._passes

        def count(_: nn.Module, __: Any) -> None:
            if not torch.compiler.is_compiling():  # a number that changes would be compiled anew each time
                passes[0] += 1

        model.register_forward_pre_hook(count)

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self._passes[:] = [0, 0]
        self._gradients.clear()

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes since `begin_step`."""
        forward, backward = self._passes
        return forward, backward

    def computed(self, loss: Tensor) -> None:
        """Count each backward pass that will reach this loss."""
        if loss.requires_grad:
            passes, gradients = self._passes, self._gradients

            def count(gradient: Tensor) -> None:
                passes[1] += 1
                gradients.append(gradient.detach())

            loss.register_hook(count)

    @property
    def loss_gradients(self) -> list[float] | None:
        """Least and most gradient that reached a loss since `begin_step`; None: none did, or not finite."""
        if not self._gradients or any(gradient.numel() != 1 for gradient in self._gradients):
            return None
        found = torch.stack([gradient.double().flatten() for gradient in self._gradients])
        ends = [float(found.min()), float(found.max())]
        return ends if all(map(math.isfinite, ends)) else None

    def look(self, module: nn.Module) -> None:
        """Note which modules are in another mode than this pass of what wraps the model."""
        # Whoever changes modes changes that of the model itself, so all modules are read once for each.
        trains = torch.is_grad_enabled()
        key = trains, self.model.training
        if key not in self._modes:
            self._modes[key] = list(self._in_mode(module, not trains))[:MOST_IN_OTHER_MODE]

    def in_other_mode(self, *, trains: bool) -> list[str] | None:
        """Modules that depend on their mode and had the wrong one in such a pass; None: there was none."""
        looks = [names for (of_pass, _), names in self._modes.items() if of_pass == trains]
        return sorted({name for names in looks for name in names}) if looks else None

    def never_trains(self) -> set[str]:
        """Modules that depend on their mode and were in evaluation mode in every training pass."""
        looks = [set(names) for (of_pass, _), names in self._modes.items() if of_pass]
        return set.intersection(*looks) if looks else set()

    def _in_mode(self, module: nn.Module, training: bool) -> Iterator[str]:
        # The reference computes in a copy of the model at low precision.
        within = any(part is self.model for part in module.modules())
        for name, part in (self.model if within else module).named_modules():
            if part.training == training and depends_on_mode(part):
                yield bare_module_name(name)


def depends_on_mode(module: nn.Module) -> bool:
    """Whether its forward pass asks for its mode; dropout of probability 0 does so in vain."""
    if getattr(module, "p", None) == 0.0 or getattr(module, "drop_prob", None) == 0.0:
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    # The only use that an attention makes of its mode may be a dropout of 0.
    rates = [getattr(module, name, None) for name in ("attention_dropout", "dropout")]
    known = [rate for rate in rates if isinstance(rate, int | float)]
    return code is not None and "training" in code.co_names and (not known or any(known))
