"""Tensors without data under the adapters' code: what libraries do with data is done otherwise, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from harness.worker.simulation.ddp import without_checks_between_ranks
from harness.worker.simulation.storages import CountingMode, FakeAllocatorProbe, resizes_noted

SUBSTITUTIONS = [
    "a value that a program reads from a tensor (gradient norm, overflow flag) is 1, 0 or false",
    "temporaries inside an operator's kernel are not seen",
]


@contextmanager
def fake_tensors(probe: FakeAllocatorProbe) -> Iterator[None]:
    """Every tensor made inside has no data; `probe` counts them."""
    with ExitStack() as stack:
        stack.enter_context(_replaced(DeviceMesh, "__init__", _with_data))
        stack.enter_context(_replaced(nn.Module, "_apply", _replacing_parameters))
        stack.enter_context(_replaced(masking_utils, "find_packed_sequence_indices", _unpacked))
        stack.enter_context(without_checks_between_ranks())
        stack.enter_context(resizes_noted(probe))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(CountingMode(probe))
        yield


@contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _with_data(make: Callable[..., None]) -> Callable[..., None]:
    """A mesh reads its coordinates from a tensor while it is made; `init_device_mesh` gives it all ranks."""

    def make_with_data(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            ranks = kwargs.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
            make(mesh, *args, **kwargs)

    return make_with_data


def _unpacked(_: Any) -> Callable[..., None]:
    """A batch is one sequence a row; transformers 5.23 would read that from the positions."""
    return lambda *_, **__: None


def _replacing_parameters(_: Any) -> Callable[..., nn.Module]:
    """`Module.to` would swap tensors, which torch 2.13 refuses for fake ones that something watches."""

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        replaced: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        for owner in module.modules() if recurse else [module]:
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    with torch.no_grad():
                        applied = fn(parameter)
                    replaced[id(parameter)] = (
                        parameter
                        if applied is parameter
                        else nn.Parameter(applied, requires_grad=parameter.requires_grad)
                    )
                owner._parameters[name] = replaced[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = fn(buffer)
        return module

    return apply
