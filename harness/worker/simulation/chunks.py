"""Pieces of a tensor that are cut when they are asked for: libraries cut one per rank and keep their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param

FEW = 64
"""Up to so many pieces are cut as torch does."""


class Chunks(Sequence[Tensor]):
    """What `torch.chunk` gives; with `padded` empty ones follow, up to the number asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int = 0, *, padded: bool = False) -> None:
        self.whole = tensor
        self._dim = dim
        self._step = max(1, -(-tensor.size(dim) // count))
        self._filled = max(1, -(-tensor.size(dim) // self._step))
        self._count = count if padded else self._filled

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        position = index % self._count
        if position >= self._filled:
            return self.whole.new_empty(0)
        begin = position * self._step
        length = min(self._step, self.whole.size(self._dim) - begin)
        return self.whole.narrow(self._dim, begin, length)


@contextmanager
def cut_when_asked_for() -> Iterator[None]:
    """FSDP 1 and 2 cut a parameter into a piece per rank to take one; thousands take minutes."""
    original: Callable[..., Any] = torch.Tensor.chunk
    gather: Callable[..., Any] = dist.all_gather

    def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
        return original(tensor, chunks, dim) if chunks <= FEW else Chunks(tensor, chunks, dim)

    def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor_list, Chunks):
            return dist.all_gather_into_tensor(tensor_list.whole, tensor, *args, **kwargs)
        return gather(tensor_list, tensor, *args, **kwargs)

    def with_empty(tensor: Tensor, num_chunks: int, dim: int) -> Sequence[Tensor]:
        return Chunks(tensor, num_chunks, dim, padded=True)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "chunk", chunk))
        stack.enter_context(patch.object(torch, "chunk", chunk))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", with_empty))
        # `_get_reduce_scatter_tensors` makes a list of the pieces, and looks at the first.
        stack.enter_context(patch.object(_runtime_utils, "list", _ListOf, create=True))
        # On the CPU `_all_gather_flat_param` gathers into a list of all pieces of one tensor.
        stack.enter_context(patch.object(_flat_param, "list", _ListOf, create=True))
        stack.enter_context(patch.object(dist, "all_gather", all_gather))
        yield


class _KeepingChunks(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, list)

    def __call__(cls, values: Any = ()) -> Any:
        return values if isinstance(values, Chunks) else list(values)


class _ListOf(metaclass=_KeepingChunks):
    """Stands for `list`, and leaves pieces uncut."""
