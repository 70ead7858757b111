"""Counts the bytes of tensors without data: an allocator's statistics where nothing is allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from harness.errors import HarnessError
from harness.worker.memory import AllocatorProbe
from harness.worker.simulation.functional import PERFORMED

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
NUMBERED_CPU = torch.device("cpu", 0)


class FakeAllocatorProbe(AllocatorProbe):
    """Every storage from the operator that made it until its last tensor is gone."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._allocated = 0
        self._peak = 0

    def allocated_bytes(self) -> int:
        return self._allocated

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def limit(self, limit_bytes: int) -> None:
        raise HarnessError("tensors without data have no limit; remove runtime.memory_limit")

    def serves(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._sizes

    def identity(self, storage: torch.UntypedStorage) -> int:
        return storage._cdata

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an operator returned, at the size that it has now."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resize(key, size)

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the size of a storage that is counted."""
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        self._allocated += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak = max(self._peak, self._allocated)

    def _forget(self, key: int) -> None:
        self._allocated -= self._sizes.pop(key)
        del self._watches[key]


class CountingMode(TorchDispatchMode):
    """Notes the storages that operators return; a value that a program asks for and that is not there is 0.

    So a gradient norm is not clipped, and no overflow skips an update.
    """

    def __init__(self, probe: FakeAllocatorProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in PLAIN for kind in types):
            return NotImplemented  # such as DTensor: comes back with its local tensors
        if func in PERFORMED:
            with self:
                return PERFORMED[func](*args)
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == NUMBERED_CPU:
            kwargs["device"] = torch.device("cpu")  # which fake tensors take for another device
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0.0 if args[0].dtype.is_floating_point else 0
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self._probe.note(tensor.untyped_storage())
        return result


@contextmanager
def resizes_noted(probe: FakeAllocatorProbe) -> Iterator[None]:
    """FSDP frees gathered weights by resizing their storage, which is no operator."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        probe.note_resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_note):
        yield
