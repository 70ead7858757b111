"""Figures of a record that an observed script and the harness's own run of its job must share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.rank.data import content_sum
from harness.record import Record

NORMS = 1000
"""Bytes up to which a collective is one of a norm: harness and torch reduce each in their own way."""
KINDS = ("weights", "gathered", "gradients", "masters", "optimizer", "buffers", "communication")


def collectives(record: Record) -> dict[Any, tuple[int, int]]:
    """Calls and bytes of the steps by rank, phase, operation, dtype and size of the group."""
    return {
        (row.rank, row.phase, row.op, row.dtype, row.group_size): (row.calls, row.payload_bytes)
        for row in record.comm
        if row.phase in ("forward", "backward", "step") and row.largest_bytes and row.largest_bytes > NORMS
    }


def states(record: Record, left_over: str | None = None) -> dict[Any, dict[str, int]]:
    """Model states by rank, step and moment, wherever the bytes lie.

    `left_over`: a kind that is looked at after the backward pass alone.
    """
    return {
        (rank.rank, part.step, part.moment): {
            kind: size
            for kind in KINDS
            if (size := ((part.kinds or {}).get(kind, 0) + (part.outside_kinds or {}).get(kind, 0)))
            and not (kind == left_over and part.moment != "after_backward")
        }
        for rank in record.ranks
        for part in rank.memory
        if part.moment != "after_setup"
    }


def sample_sums(record: Record) -> list[int]:
    """Of each step, the sum of the hashes of the samples that reached the model on any rank."""
    per_rank = [rank.batch_hash_sums for rank in record.ranks]
    return [sum(int(value or "0", 16) for value in values) % 2**64 for values in zip(*per_rank, strict=True)]


def kept_sums(kept: Path, ranks: int, accumulation: int, fields: Mapping[str, str]) -> list[int]:
    """The same of the batches that a run of the script left; `fields`: names here -> of the script."""
    names = [next(iter(fields.values())), *(["labels"] if fields.get("labels") == "labels" else [])]
    totals: list[int] = []
    for rank in range(ranks):
        batches = torch.load(kept / f"batches-{rank}.pt")
        for micro, batch in enumerate(batches):
            step = micro // accumulation
            totals += [0] * (step + 1 - len(totals))
            totals[step] += int(content_sum({name: batch[name] for name in names}))
    return [total % 2**64 for total in totals]
