"""The ranks of a run as one of them sees them. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.backends.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one run as one of them sees them."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: str
    """Device type: 'cpu' or 'cuda'."""
    layout: Mesh | None = None
    """As the backend's options lay the ranks out; None: all of them are data parallel."""

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def mesh(self) -> Mesh:
        """The dimensions of the ranks."""
        return self.layout or Mesh.data_parallel(self.world_size)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.mesh.data_size

    @property
    def data_rank(self) -> int:
        """Which share of each micro-batch this rank gets."""
        return self.mesh.data_rank(self.rank)
