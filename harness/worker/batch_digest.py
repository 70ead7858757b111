"""What a batch contains, as digests: equal if two runs trained on the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from harness.backends.base import Batch

# Odd constants that spread bits over 64 (Steele, Lea, Flood, 'Fast splittable pseudorandom number
# generators', 2014), as signed integers.
_TOKEN = 0x9E3779B97F4A7C15 - 2**64
_LABEL = 0xBF58476D1CE4E5B9 - 2**64
_MIX = 0x94D049BB133111EB - 2**64


class SeenBatch:
    """A batch that reached a model: noted while the step runs, read once its clock has stopped."""

    def __init__(self, batch: Batch) -> None:
        self._tensors = (batch["tokens"], batch["labels"])
        self._as_fed = self._versions()

    def content_sum(self) -> int | None:
        """`content_sum` of what the model was given; None if it was overwritten since then."""
        return int(content_sum(*self._tensors)) if self._versions() == self._as_fed else None

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def batch_hash_sum(batches: Iterable[SeenBatch]) -> int | None:
    """Sum modulo 2^64 over batches; None: one of them was overwritten."""
    sums = [batch.content_sum() for batch in batches]
    return None if None in sums else sum(s for s in sums if s is not None) % 2**64


def content_digests(tokens: Tensor, labels: Tensor) -> list[str]:
    """A digest of each sample, from (samples, length) tensors on any device; synchronises with it."""
    return [_digest(*pair) for pair in zip(tokens.cpu(), labels.cpu(), strict=True)]


def content_sum(tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum modulo 2^64 of a hash of each sample: int64, a scalar on the samples' device.

    tokens, labels: int64 (samples, length).
    """
    # Integer products wrap around, so a position's weight is its number times an odd constant.
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    mixed = (tokens + position * _TOKEN) * _MIX
    mixed = ((mixed ^ (mixed >> 29)) + labels) * _LABEL
    rows = (mixed ^ (mixed >> 32)).sum(dim=1)
    return ((rows ^ (rows >> 31)) * _MIX).sum()


def _digest(tokens: Tensor, labels: Tensor) -> str:
    digest = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()
