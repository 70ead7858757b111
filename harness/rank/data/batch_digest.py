"""What a batch contains, as digests: equal if two runs trained on the same samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from harness.backends.base import Batch

# Odd constants that spread bits over 64 (Steele, Lea, Flood, 'Fast splittable pseudorandom number
# generators', 2014), as signed integers.
_TOKEN = 0x9E3779B97F4A7C15 - 2**64
_LABEL = 0xBF58476D1CE4E5B9 - 2**64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
_MIX = 0x94D049BB133111EB - 2**64


class SeenBatch:
    """A batch that reached a model: noted while the step runs, read once its clock has stopped."""

    def __init__(self, batch: Batch) -> None:
        self._batch = dict(batch)
        self._as_fed = self._versions()

    def content_sum(self) -> int | None:
        """`content_sum` of what the model was given; None if it was overwritten since then."""
        return int(content_sum(self._batch)) if self._versions() == self._as_fed else None

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._batch.values()]


def batch_hash_sum(batches: Iterable[SeenBatch]) -> int | None:
    """Sum modulo 2^64 over batches; None: one of them was overwritten."""
    sums = [batch.content_sum() for batch in batches]
    return None if None in sums else sum(s for s in sums if s is not None) % 2**64


def content_digests(batch: Batch) -> list[str]:
    """A digest of each sample, from tensors of (samples, ...) on any device; synchronises with it."""
    on_host = [tensor.cpu() for tensor in batch.values()]
    return [_digest(values) for values in zip(*on_host, strict=True)]


def content_sum(batch: Batch) -> Tensor:
    """The sum modulo 2^64 of a hash of each sample: int64, a scalar on the samples' device.

    batch: tensors of (samples, ...); fields count in their order.
    """
    total = None
    for tensor in batch.values():
        rows = _row_hashes(tensor)
        total = rows if total is None else (total ^ (total >> 29)) * _LABEL + rows
    assert total is not None
    return ((total ^ (total >> 31)) * _MIX).sum()


def _row_hashes(tensor: Tensor) -> Tensor:
    """int64 (samples): of the bits of each sample's elements and their places."""
    values = as_integers(tensor)
    # Integer products wrap around, so a position's weight is its number times an odd constant.
    position = torch.arange(1, values.shape[1] + 1, device=values.device)
    mixed = (values + position * _TOKEN) * _MIX
    return (mixed ^ (mixed >> 32)).sum(dim=1)


def as_integers(tensor: Tensor) -> Tensor:
    """int64 (samples, elements) that are equal where bits are."""
    flat = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten(1)
    if flat.is_floating_point():
        flat = flat.contiguous().view(_BITS[flat.element_size()])
    return flat.long()


def _digest(values: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        # NumPy knows neither bfloat16 nor the kinds of float8.
        digest.update(value.resolve_conj().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
