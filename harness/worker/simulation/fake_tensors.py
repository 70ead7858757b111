"""Tensors without data under the adapters' code: what libraries do with data is done otherwise, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _flat_param
from torch.utils._python_dispatch import _disable_current_modes

from harness.backends import gradients
from harness.backends.gradients import local_shard
from harness.worker.packed import unpacked_samples
from harness.worker.simulation.chunks import cut_when_asked_for
from harness.worker.simulation.ddp import without_checks_between_ranks
from harness.worker.simulation.storages import CountingMode, FakeAllocatorProbe, resizes_noted

SUBSTITUTIONS = [
    "values that a program reads from a tensor are 0: no gradient is clipped, no update skipped",
    "buffers that a kernel allocates for itself are not seen",
]


@contextmanager
def fake_tensors(probe: FakeAllocatorProbe) -> Iterator[None]:
    """Every tensor made inside has no data; `probe` counts them."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(DeviceMesh, "__init__", _with_data(DeviceMesh.__init__)))
        stack.enter_context(patch.object(nn.Module, "_apply", _convert))
        # A batch is one sequence a row, which transformers 5.23 would read from the positions.
        stack.enter_context(unpacked_samples())
        # The norm of a large tensor would be added up from hundreds of thousands of pieces.
        stack.enter_context(patch.object(gradients, "DOT_ELEMENTS", sys.maxsize))
        # FSDP1 compares addresses of data.
        stack.enter_context(patch.object(_flat_param, "_data_ptr_allocated", _is_allocated))
        stack.enter_context(patch.object(_flat_param, "_same_storage", _same_storage))
        stack.enter_context(without_checks_between_ranks())
        stack.enter_context(cut_when_asked_for())
        stack.enter_context(resizes_noted(probe))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(CountingMode(probe))
        yield


def _with_data(make: Callable[..., None]) -> Callable[..., None]:
    """A mesh reads its coordinates from a tensor while it is made: of all ranks by `init_device_mesh`, and in
    rows by FSDP2 where it reshards within groups."""

    def make_with_data(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            ranks = kwargs.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = _all_ranks(ranks)
            args = tuple(_all_ranks(given) if isinstance(given, FakeTensor) else given for given in args)
            make(mesh, *args, **kwargs)

    return make_with_data


def _all_ranks(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=like.dtype).view(like.shape)


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module.to` would swap tensors, which torch 2.13 refuses for fake ones that something watches."""
    for owner in module.modules() if recurse else [module]:
        for parameter in owner._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fn(buffer)
    return module


def _is_allocated(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _same_storage(first: Tensor, second: Tensor) -> bool:
    return local_shard(first).untyped_storage()._cdata == local_shard(second).untyped_storage()._cdata
