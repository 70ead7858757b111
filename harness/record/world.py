"""The ranks of a run."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from harness.backends.mesh import Dimension, Mesh
from harness.bounds import MOST_RANKS
from harness.record.part import Part


class DimensionPart(Part):
    """One dimension of the ranks."""

    name: Dimension
    """What ranks along it divide: 'data' and 'shard' the samples, 'tensor' each layer, 'sequence' each
    sample, 'pipeline' the layers."""
    size: int = Field(ge=1, le=MOST_RANKS)
    """Ranks along it."""


class WorldPart(Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int = Field(ge=1, le=MOST_RANKS)
    """Machines that the ranks ran on."""
    ranks_per_node: int = Field(ge=1, le=MOST_RANKS)
    """Ranks on each of them."""
    world_size: int = Field(ge=1, le=MOST_RANKS)
    """Ranks altogether."""
    device: str
    """'cpu' or 'cuda'."""
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    """CPU threads of each rank."""
    micro_batch_size: PositiveInt
    """Samples per rank and forward pass."""
    accumulation_steps: PositiveInt
    """Forward passes per optimizer step and rank."""
    preset: str
    """`runtime.preset`: settings shared by all libraries, or their own defaults."""
    memory_limit_bytes: int | None = None
    """What torch's allocator was allowed to serve of each rank's device; None: all of it."""
    dimensions: list[DimensionPart] = []
    """How the ranks are laid out, outermost first; empty: each of them has samples of its own."""

    @property
    def mesh(self) -> Mesh:
        """The dimensions of the ranks."""
        sizes = tuple((part.name, part.size) for part in self.dimensions)
        return Mesh(sizes) if sizes else Mesh.data_parallel(self.world_size)

    @property
    def layout(self) -> str:
        """How the ranks are laid out: 'data 2 x tensor 2'."""
        return str(self.mesh) if self.dimensions else "data parallel"

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.mesh.data_size
