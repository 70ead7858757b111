"""How the ranks of a run are laid out in named dimensions, and which of them share samples.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .refusals import Unsupported

Dimension = Literal["pipeline", "data", "shard", "sequence", "tensor"]
"""Ranks along 'data' replicate the weights, along 'shard' they cut the states; both split the samples.
Ranks along 'tensor' cut each layer, along 'sequence' each sample, along 'pipeline' the layers: they share
samples."""
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
SPLITTING = ("data", "shard")
"""Dimensions along which ranks hold different samples."""
SAME_LOSS = ("tensor",)
"""Dimensions along which every rank computes the whole loss of its samples; along the other shared ones each
computes a part, which may be zero, and the parts add up."""
WORLD = "world"
ALONE = "alone"


@dataclass(frozen=True)
class Mesh:
    """Sizes of the dimensions, outermost first: ranks that differ in the last one only are neighbours.

    As `torch.distributed.init_device_mesh` numbers them.
    """

    sizes: tuple[tuple[Dimension, int], ...]

    @classmethod
    def of(cls, world_size: int, dimensions: Mapping[Dimension, int | None]) -> Mesh:
        """The mesh of these sizes, outermost first; the dimension that is None takes the ranks left.

        Raises Unsupported where the sizes do not divide `world_size`.
        """
        inner = math.prod(size for size in dimensions.values() if size is not None)
        left, rest = divmod(world_size, inner)
        if rest or not left or (None not in dimensions.values() and left != 1):
            sizes = " x ".join(f"{name} {size}" for name, size in dimensions.items() if size is not None)
            raise Unsupported(f"{sizes} does not fit {world_size} ranks; choose sizes that divide them")
        return cls(tuple((name, left if size is None else size) for name, size in dimensions.items()))

    @classmethod
    def data_parallel(cls, world_size: int) -> Mesh:
        """The mesh of a strategy in which every rank has samples of its own."""
        return cls((("data", world_size),))

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return math.prod(size for name, size in self.sizes if name in SPLITTING)

    @property
    def shares_samples(self) -> bool:
        """Whether some ranks hold the same samples."""
        return self.data_size < self.world_size

    @property
    def cuts_model(self) -> bool:
        """Whether ranks compute different parts of the model."""
        return self.size("tensor") * self.size("pipeline") > 1

    def size(self, dimension: Dimension) -> int:
        """Ranks along a dimension; 1 where the mesh does not have it."""
        return next((size for name, size in self.sizes if name == dimension), 1)

    @property
    def model_parts(self) -> int:
        """Ranks over which one copy of the model is divided; 1 where the mesh says nothing of that."""
        return math.prod(size for name, size in self.sizes if name not in ("data", "sequence"))

    def coordinates(self, rank: int) -> dict[Dimension, int]:
        """Place of a rank in each dimension."""
        found: dict[Dimension, int] = {}
        for name, size in reversed(self.sizes):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def data_rank(self, rank: int) -> int:
        """Which share of each micro-batch a rank gets, from 0 to below `data_size`."""
        place, found = self.coordinates(rank), 0
        for name, size in self.sizes:
            if name in SPLITTING:
                found = found * size + place[name]
        return found

    def sample_groups(self, ranks: Iterable[int]) -> list[list[int]]:
        """Those of these ranks that share samples, by data rank."""
        found: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            found.setdefault(self.data_rank(rank), []).append(rank)
        return [found[data_rank] for data_rank in sorted(found)]

    def counts_samples(self, rank: int) -> bool:
        """Whether it is the first of those that share its samples: what is summed over samples is its own."""
        place = self.coordinates(rank)
        return not any(place[name] for name in place if name not in SPLITTING)

    def counts_loss(self, rank: int) -> bool:
        """Whether its loss belongs to the sum over ranks: those of 'tensor' peers are the same."""
        place = self.coordinates(rank)
        return not any(place[name] for name in place if name in SAME_LOSS)

    def role(self, ranks: Sequence[int]) -> str | None:
        """The dimensions along which a group of ranks lies: 'tensor', 'data+sequence'.

        'world': all ranks of several dimensions; 'alone': a single rank; None: not all ranks along some."""
        places = [self.coordinates(rank) for rank in ranks]
        along = [name for name, _ in self.sizes if len({place[name] for place in places}) > 1]
        role = "+".join(along) or ALONE
        if sorted(ranks) != self.group(role, ranks[0]):
            return None
        return WORLD if len(along) > 1 and len(ranks) == self.world_size else role

    def group(self, role: str, rank: int) -> list[int]:
        """Ranks of the group of this role that `rank` is in, in order."""
        place, along, found = self.coordinates(rank), self._along(role), [0]
        for name, size in self.sizes:
            own = range(size) if name in along else (place[name],)
            found = [at * size + index for at in found for index in own]
        return found

    def groups(self, role: str) -> list[list[int]]:
        """All groups of this role, each in order."""
        along = self._along(role)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            apart = tuple(at for name, at in self.coordinates(rank).items() if name not in along)
            found.setdefault(apart, []).append(rank)
        return list(found.values())

    def canonical(self, role: str) -> str:
        """The name of a role where several name the same ranks."""
        return self.role(self.group(role, 0)) or role

    def group_size(self, role: str) -> int:
        """Ranks in a group of this role."""
        along = self._along(role)
        return math.prod(size for name, size in self.sizes if name in along)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes)

    def _along(self, role: str) -> set[str]:
        return {name for name, _ in self.sizes} if role == WORLD else set(role.split("+"))


SECOND_COPY = ("hpz", "reshard")
"""Options that have groups of ranks keep a second copy of the weights, to gather them within the group."""
