"""Draws a model's random weights module by module, with the very numbers of a plain build.

A plain build of a Hugging Face model draws twice from one generator: constructors initialise each layer, then
`_init_weights` initialises each module. Both passes run here in their order; what a module has drawn is
handed on and dropped, so that at most one layer, or one transformer block, is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.worker.loading.skeleton import on_meta, registering

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
