"""Collectives of one rank."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from harness.forms.terms import OPERATIONS
from harness.record.part import Part


def _known(op: str) -> str:
    if op not in OPERATIONS:
        raise ValueError(f"is no collective that is counted: {', '.join(sorted(OPERATIONS))}")
    return op


class CommunicationPart(Part):
    """Collectives of one kind on one rank.

    Summed over the probed steps in the phases forward, backward and step, and of observed scripts 'between',
    which is everything between the update and the next forward pass; over the whole run in the
    phases setup, evaluation, checkpoint and checkpoint_load, and in digest, the gathering of the
    initial weights for their digest. A call that joins tensors of several dtypes is counted under each
    of them.
    """

    rank: int
    """Global rank."""
    phase: str
    """Phase of the run: 'setup', 'digest', 'forward', 'backward', 'step', 'evaluation', 'checkpoint' or
    'checkpoint_load'."""
    op: Annotated[str, AfterValidator(_known)]
    """Operation, such as 'all_reduce'."""
    dtype: str
    """Dtype of the tensors; 'none': a call without a tensor."""
    group: str
    """Name of the process group."""
    group_ranks: list[int]
    """Global ranks of the group."""
    group_size: int
    """Number of its ranks."""
    calls: int
    """Number of calls."""
    payload_bytes: int
    """Size of the whole tensors that these calls work on."""
    largest_bytes: int | None = None
    """The same of the largest call; None in records from before it was kept."""
    role: str = "world"
    """What the group is for: 'world', all ranks; 'shard', those that share one copy of the weights;
    'replica', those that hold the same shard. Where ranks share samples: the dimensions of the mesh along
    which the group lies, such as 'tensor' or 'data+sequence', 'alone', or 'other'."""
