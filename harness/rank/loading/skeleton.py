"""Builds a model without its weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.backends.model_source import Loading
from harness.errors import JobError
from harness.job.job import Job
from harness.rank.models.model import build_own_model

Register = Callable[[nn.Module, str, nn.Parameter | None], None]


@contextmanager
def registering(register: Register) -> Iterator[Register]:
    """Have modules register their parameters through a function; yields torch's own."""
    plain = nn.Module.register_parameter
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield plain  # type: ignore[misc]
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it is there already."""
    if parameter.is_meta:
        return parameter
    shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(shape, requires_grad=parameter.requires_grad)


Build = Callable[[], nn.Module]


class CannotStream(Exception):
    """This model draws its weights in another way; build it plainly."""


def parameter_numbers(build_skeleton: Build) -> tuple[nn.Module, dict[int, str]]:
    """Build a skeleton; also say which of the registered parameters, numbered in order, has which name.

    A parameter that was replaced by another, as a tied one is, has no name.
    """
    numbers: dict[int, tuple[int, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            number = len(numbers)
            parameter = on_meta(parameter)
            numbers[id(parameter)] = number, parameter
        plain(module, name, parameter)

    with registering(register) as plain:
        model = build_skeleton()
    return model, {numbers[id(p)][0]: name for name, p in model.named_parameters() if id(p) in numbers}


def stream_weights(
    build: Build, names: Mapping[int, str], keep: Callable[[str, Tensor], None], *, by_block: bool = True
) -> None:
    """Run `build`, handing each named parameter to `keep` once it is initialised.

    build: a plain build, the generator's seed included. names: see `parameter_numbers`. by_block: wait until
    the transformer block is initialised, since some initialise their layers' weights again. Raises
    CannotStream for a model whose initialisation reaches beyond that.
    """
    pass_over = _Streaming(names, keep, by_block)
    with pass_over.at_work(), _GuardMeta():
        build()
    if left := sorted(set(names.values()) - pass_over.kept):
        raise CannotStream(f"{len(left)} parameters were not initialised by a module, such as '{left[0]}'")


class _Streaming:
    def __init__(self, names: Mapping[int, str], keep: Callable[[str, Tensor], None], by_block: bool) -> None:
        self._names = names
        self._keep = keep
        self._by_block = by_block
        self._scratch = None if by_block else _Scratch()
        self._registered = 0
        self._constructs = False
        self._in_blocks: tuple[Any, set[int]] = (None, set())
        self.kept: set[str] = set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        import transformers
        from transformers.pytorch_utils import Conv1D

        base: Any = transformers.PreTrainedModel
        plain_initialise = base._initialize_weights
        plain_constructors = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding, Conv1D)}

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not hasattr(parameter, "harness_number"):
                if self._scratch is not None and self._constructs and not parameter.is_meta:
                    parameter = self._scratch.like(parameter)
                parameter.harness_number = self._registered  # type: ignore[attr-defined]
                self._registered += 1
            plain_register(module, name, parameter)

        def constructing(plain: Any) -> Any:
            def construct(module: nn.Module, *arguments: Any, **keywords: Any) -> None:
                self._constructs = True
                if self._scratch is not None:
                    self._scratch.reuse()
                plain(module, *arguments, **keywords)
                _to_meta(module)
                self._constructs = False

            return construct

        def initialise(model: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> None:
            if getattr(module, "_is_hf_initialized", False):
                return
            if self._scratch is not None:
                self._scratch.reuse()
            _to_memory(module, self._scratch)
            plain_initialise(model, module, *arguments, **keywords)
            self._initialised(model, module)

        with registering(register) as plain_register:
            try:
                for kind, plain in plain_constructors.items():
                    kind.__init__ = constructing(plain)  # type: ignore[misc,method-assign]
                base._initialize_weights = initialise
                yield
            finally:
                for kind, plain in plain_constructors.items():
                    kind.__init__ = plain  # type: ignore[misc,method-assign]
                base._initialize_weights = plain_initialise

    def _initialised(self, model: Any, module: nn.Module) -> None:
        if not self._by_block:
            self._hand_on(module)
            return
        # GPT-2's blocks initialise their projections a second time, after the layers themselves.
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        if self._in_blocks[0] is not model:
            found = [m for m in model.modules() if type(m).__name__ in blocks]
            self._in_blocks = model, {id(part) for block in found for part in block.modules()}
        if type(module).__name__ in blocks:
            for part in module.modules():
                self._hand_on(part)
        elif id(module) not in self._in_blocks[1]:
            self._hand_on(module)

    def _hand_on(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            name = self._names.get(parameter.harness_number)  # type: ignore[attr-defined]
            if name is not None:
                if name in self.kept:
                    raise CannotStream(f"'{name}' is initialised twice")
                self.kept.add(name)
                self._keep(name, parameter.detach())
        _to_meta(module)


def _to_meta(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        _replace(module, name, parameter, on_meta(parameter))


def _to_memory(module: nn.Module, scratch: _Scratch | None) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            _replace(module, name, parameter, (scratch or _Scratch()).like(parameter))


class _Scratch:
    """Memory for the parameters of one layer after the other: fresh pages cost a third of the drawing."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reuse(self) -> None:
        """Forget the layer before."""
        self._used = 0

    def like(self, parameter: nn.Parameter) -> nn.Parameter:
        """An uninitialised parameter of the same shape and dtype."""
        begin, end = self._used, self._used + parameter.numel() * parameter.element_size()
        if end > self._memory.numel():
            # What was handed out of the old memory keeps it.
            begin, end = 0, end - begin
            self._memory = torch.empty(end, dtype=torch.uint8)
        self._used = -(-end // 64) * 64
        values = self._memory[begin:end].view(parameter.dtype).view(parameter.shape)
        return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _replace(module: nn.Module, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
    new.harness_number = old.harness_number  # type: ignore[attr-defined]
    module._parameters[name] = new


class _GuardMeta(TorchDispatchMode):
    """Raises CannotStream where weights that are not in memory would be written: the draw would be lost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            raise CannotStream(f"{func} writes weights of another module")
        return func(*args, **(kwargs or {}))


BUFFERS_NAME = "buffers.safetensors"


def why_whole(job: Job, asked: Loading) -> str | None:
    """Why every rank builds the whole model although `asked` is not 'full'; None: no rank needs to.

    The functions of modules run with parameters on the meta device. What they write to these is lost, and
    comes from a file that one process writes; what they read from these cannot be had.
    """
    reason = job.why_whole(asked)
    if reason is not None or asked == "full" or job.model.factory is None:
        return reason
    try:
        skeleton, _ = parameter_numbers(lambda: build_own_model(job, weights=False))
    except JobError as error:
        return f"it cannot be built without memory for its parameters: {error}"
    complex_ones = (name for name, parameter in skeleton.named_parameters() if parameter.is_complex())
    if (name := next(complex_ones, None)) is not None:
        return f"parameter '{name}' is complex, and files of weights hold real numbers"
    return next(_values_of_weights(skeleton), None)


def _values_of_weights(skeleton: nn.Module) -> Iterator[str]:
    for name, module in skeleton.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                where = f"{name}.{attribute}" if name else attribute
                yield f"'{where}' is made of its weights and no buffer"


def write_buffers(model: nn.Module, folder: Path) -> None:
    """Write every buffer of a whole model."""
    from safetensors.torch import save_file

    # Each in memory of its own: safetensors refuses tensors that share some.
    save_file({name: buffer.clone() for name, buffer in model.named_buffers()}, folder / BUFFERS_NAME)


def fill_buffers(skeleton: nn.Module, folder: Path) -> None:
    """Give a skeleton the buffers of the whole model: it drew none of the numbers that weights take."""
    from safetensors.torch import load_file

    values = load_file(folder / BUFFERS_NAME)
    with torch.no_grad():
        for prefix, module in skeleton.named_modules():
            for name in module._buffers:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    module._buffers[name] = values[full]
