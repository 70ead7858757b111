"""What runs on several nodes send within and between them."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.nodes import node_volumes
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes

COLUMNS = (
    Column("backend", "backend", align="left"),
    Column("nodes", "nodes"),
    Column("world_size", "ranks"),
    Column("inside_bytes_per_step", "inside MB/step", megabytes),
    Column("between_bytes_per_step", "between MB/step", megabytes),
    Column("between_world_bytes_per_step", "by all ranks MB", megabytes),
    Column("between_shard_bytes_per_step", "by shard groups MB", megabytes),
    Column("between_replica_bytes_per_step", "by replica groups MB", megabytes),
)
TEXT = (
    "What the ranks of the node that sends most hand to the transport per optimizer step, to ranks of their "
    "own node and to other nodes, for rings in the order of the ranks, emulated collectives as the transport "
    "runs them. The last three columns divide what crosses by the groups that send it: with hybrid sharding "
    "on whole nodes only the replica groups cross, apart from scalars such as the gradient norm."
)


def nodes_section(comparison: Comparison) -> Section | None:
    """A line for each cell, of its first run that was counted; None where every run was on one node."""
    body = []
    for group in comparison.groups:
        record = group.record
        of_runs = [node_volumes(row.record) for row in group.rows] if record.world.nodes > 1 else []
        volumes = next(filter(None, of_runs), [])
        if volumes:
            most = max(volumes, key=lambda volume: volume.between)
            roles = [most.between_by_role.get(role, 0.0) for role in ("world", "shard", "replica")]
            world = record.world
            body.append([group.label, world.nodes, world.world_size, most.inside, most.between, *roles])
    if not body:
        return None
    table = Table(key="nodes", columns=COLUMNS, rows=body)
    return Section("nodes", "Within and between nodes", [Paragraph(TEXT), table])
