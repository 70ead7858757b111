"""The two-dimensional layout of hybrid sharding: shard within a group of ranks, replicate across groups."""

from __future__ import annotations

from harness.backends.base import BackendOptions, World


def shard_size(world: World, requested: int | None) -> int:
    """Ranks in one shard group: as requested, else the ranks of a node, else half of the only node."""
    if requested is not None:
        return requested
    return world.ranks_per_node if world.nodes > 1 else max(1, world.world_size // 2)


def unmet_hybrid(world: World, requested: int | None) -> list[str]:
    """Why `world` cannot be cut into shard groups of one size with at least two groups of two ranks."""
    size = shard_size(world, requested)
    return unmet_groups(
        world, "shard_size", size, "hybrid sharding needs at least 2 replicas of at least 2 shards"
    )


def unmet_groups(world: World, option: str, size: int, needs: str) -> list[str]:
    """Why `world` cannot be cut into two or more groups of `size` ranks (2 or more), which `needs` says."""
    if world.world_size % size:
        return [f"{option} {size} does not divide the world size {world.world_size}; choose a divisor"]
    if size < 2 or world.world_size // size < 2:
        return [
            f"{needs}; world size {world.world_size} with {option} {size} gives "
            f"{world.world_size // size} x {size}"
        ]
    return []


SECOND_COPY = ("hpz", "reshard")
"""Options that have groups of ranks keep a second copy of the weights, to gather them within the group."""


def unmet_second_copy(world: World, options: BackendOptions) -> list[str]:
    """Why `world` has no such groups; empty: it has, or none are asked for."""
    given = [(name, size) for name in SECOND_COPY if (size := getattr(options, name, None)) is not None]
    if given and options.mesh(world.world_size).shares_samples:
        return [f"{name} is run only where every rank has samples of its own" for name, _ in given]
    return [
        why
        for name, size in given
        for why in unmet_groups(world, name, size, f"{name} needs at least 2 groups of at least 2 ranks")
    ]
