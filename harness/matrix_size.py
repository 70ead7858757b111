"""How many cells a comparison may have."""

from __future__ import annotations

from collections.abc import Sequence

from harness.bounds import MOST_CELLS, MOST_RANKS, MOST_REPEATS
from harness.errors import HarnessError


def require_plannable(backends: int, world_sizes: Sequence[int], repeats: int) -> None:
    """Raise HarnessError for a matrix that would take longer to plan than anybody waits."""
    if repeats > MOST_REPEATS:
        raise HarnessError(f"--repeats was given {repeats}; at most {MOST_REPEATS} are allowed")
    if max(world_sizes, default=1) > MOST_RANKS:
        raise HarnessError(f"{max(world_sizes)} ranks were asked for; at most {MOST_RANKS:,} are planned")
    if (cells := backends * len(world_sizes) * repeats) > MOST_CELLS:
        raise HarnessError(
            f"{backends} backends on {len(world_sizes)} numbers of ranks, {repeats} runs of each, are "
            f"{cells:,} cells; at most {MOST_CELLS:,} are planned"
        )
