"""The ranks of a run."""

from __future__ import annotations

from pydantic import Field

from harness.bounds import MOST_RANKS
from harness.record.part import Part


class WorldPart(Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int = Field(le=MOST_RANKS)
    """Machines that the ranks ran on."""
    ranks_per_node: int = Field(le=MOST_RANKS)
    """Ranks on each of them."""
    world_size: int = Field(le=MOST_RANKS)
    """Ranks altogether."""
    device: str
    """'cpu' or 'cuda'."""
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    """CPU threads of each rank."""
    micro_batch_size: int
    """Samples per rank and forward pass."""
    accumulation_steps: int
    """Forward passes per optimizer step and rank."""
    preset: str
    """`runtime.preset`: settings shared by all libraries, or their own defaults."""
    memory_limit_bytes: int | None = None
    """What torch's allocator was allowed to serve of each rank's device; None: all of it."""
