"""What the self-check can try on this machine, and why it leaves the rest out: no run is made here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.backends import registry

FAMILIES = ("ddp", "zero3", "fsdp")
"""One of each library and strategy, tried whatever the time; then the planted defects, then the rest."""
ONE_RANK_IS_NO_SHARD = ("fsdp1", "fsdp1-grad-op")


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A planted defect and the finding that must name it."""

    backend: str
    finding: str


BETWEEN_RANKS = (
    Defect(backend="planted-gradients-summed", finding="gradient-scale"),
    Defect(backend="planted-wrong-beta2", finding="update-differs"),
    Defect(backend="planted-stale-weights", finding="replicas-differ"),
)
ON_ONE_RANK = (
    Defect(backend="planted-divided-again", finding="gradient-scale"),
    Defect(backend="planted-wrong-beta2", finding="update-differs"),
    Defect(backend="planted-left-out", finding="parameters-not-updated"),
)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What is tried, in this order, and what is not."""

    first: tuple[str, ...]
    """Backends that are tried whatever the time."""
    rest: tuple[str, ...]
    """Backends that are tried while there is time."""
    defects: tuple[Defect, ...]
    left_out: Mapping[str, str]
    """What is not tried, and why."""


def cover(names: Sequence[str], ranks: int, installed: Collection[str]) -> Coverage:
    """What to try on so many ranks: the backends named, else all that come with this project.

    `installed` holds the distributions that are there.
    """
    known = names or [
        name
        for name, entry in registry.entries().items()
        if entry.target.startswith("harness.backends.") and name != registry.REFERENCE
    ]
    left_out = {name: why for name in known if (why := _obstacle(name, ranks, installed)) is not None}
    wanted = [name for name in known if name not in left_out]
    if ranks == 1:
        left_out["reduction and sharding over ranks"] = "there is one rank, and these need two"
    first = wanted if names else [name for name in FAMILIES if name in wanted]
    return Coverage(
        first=tuple(first),
        rest=tuple(name for name in wanted if name not in first),
        defects=BETWEEN_RANKS if ranks > 1 else ON_ONE_RANK,
        left_out=left_out,
    )


def _obstacle(name: str, ranks: int, installed: Collection[str]) -> str | None:
    entry, _ = registry.parse(name)
    missing = [package for package in entry.packages if package not in installed]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {are} not installed (pip install {' '.join(missing)})"
    if ranks == 1 and entry.name in ONE_RANK_IS_NO_SHARD:
        return "FSDP1 takes NO_SHARD on one rank whatever was asked"
    return None
