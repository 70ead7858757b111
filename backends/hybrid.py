"""The two-dimensional layout of hybrid sharding: shard within a group of ranks, replicate across groups."""

from __future__ import annotations

from harness.backends.base import World


def shard_size(world: World, requested: int | None) -> int:
    """Ranks in one shard group: as requested, else the ranks of a node, else half of the only node."""
    if requested is not None:
        return requested
    return world.ranks_per_node if world.nodes > 1 else max(1, world.world_size // 2)


def unmet_hybrid(world: World, requested: int | None) -> list[str]:
    """Why `world` cannot be cut into shard groups of one size with at least two groups of two ranks."""
    size = shard_size(world, requested)
    if world.world_size % size:
        return [f"shard_size {size} does not divide the world size {world.world_size}; choose a divisor"]
    if size < 2 or world.world_size // size < 2:
        return [
            f"hybrid sharding needs at least 2 replicas of at least 2 shards; world size {world.world_size} "
            f"with shard_size {size} gives {world.world_size // size} x {size}"
        ]
    return []
