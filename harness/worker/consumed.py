"""What one rank was fed in one step: noted while the step runs, added up once its clock has stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from harness.worker.samples import Samples

LEDGER_MODULUS = 2**64
Tokens = NDArray[numpy.int64]


class Consumed:
    """The micro-batches of one step."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._batches: list[tuple[Sequence[int], Tokens, Tokens]] = []

    def note(self, ids: Sequence[int], tokens: Tensor, labels: Tensor) -> None:
        """Remember a micro-batch that is about to be fed; tokens, labels: int64 (ids, length), on the CPU.

        The contents are copied, outside of torch's allocator: whatever an engine does to its batch, the
        ledger hashes what it was given.
        """
        self._batches.append((ids, tokens.numpy().copy(), labels.numpy().copy()))

    def totals(self) -> dict[str, Any]:
        """Samples, tokens that are no padding, target tokens and ledger, as a step's event has them."""
        ids = [sample_id for batch_ids, _, _ in self._batches for sample_id in batch_ids]
        ledger = sum(
            ledger_entry(sample_id, tokens[row], labels[row])
            for batch_ids, tokens, labels in self._batches
            for row, sample_id in enumerate(batch_ids)
        )
        return {
            "samples": len(ids),
            "tokens": int(self._samples.lengths[ids].sum()),
            "target_tokens": int(self._samples.targets[ids].sum()),
            "ledger": f"{ledger % LEDGER_MODULUS:016x}",
        }


def ledger_entry(sample_id: int, tokens: Tokens, labels: Tokens) -> int:
    """64-bit hash of one sample: its id and what it really contains."""
    digest = hashlib.blake2b(str(sample_id).encode(), digest_size=8)
    digest.update(tokens.tobytes())
    digest.update(labels.tobytes())
    return int.from_bytes(digest.digest(), "big")
