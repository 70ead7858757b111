"""What the self-check can try on this machine, and why it leaves the rest out: no run is made here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.backends import registry
from harness.backends.library_facts import not_installed
from harness.backends.strategy import StrategyKind


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
        if not entry.is_third_party and name != registry.REFERENCE
    ]
    left_out = {name: why for name in known if (why := _obstacle(name, ranks, installed)) is not None}
    wanted = [name for name in known if name not in left_out]
    if ranks == 1:
        left_out["reduction and sharding over ranks"] = "there is one rank, and these need two"
    first = wanted if names else [name for name in wanted if registry.BUILT_IN[name].in_short_check]
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
        return not_installed(missing)
    if entry.strategy is not None and entry.strategy.multiplies_gradients and ":" not in name:
        return (
            "its gradients are too large as DeepSpeed makes them (gradient-scale); "
            f"name {name}:correct_gradients=true"
        )
    if ranks == 1 and entry.strategy is not None and _needs_two_ranks(entry.strategy):
        return "FSDP1 takes NO_SHARD on one rank whatever was asked"
    return None


def _needs_two_ranks(strategy: StrategyKind) -> bool:
    """Hybrid sharding says by itself that one rank is too few; Accelerate's FSDP that it needs a device."""
    native = strategy.route == "native" and not strategy.of_family.shards_one_rank
    return native and strategy.stage > 0 and not strategy.facts.has_replicas
