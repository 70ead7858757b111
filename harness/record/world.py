"""The ranks of a run."""

from __future__ import annotations

from harness.record.part import Part


class WorldPart(Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int
    ranks_per_node: int
    world_size: int
    device: str
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    micro_batch_size: int
    accumulation_steps: int
    preset: str
    memory_limit_bytes: int | None = None
    """What torch's allocator was allowed to serve of each rank's device; None: all of it."""
