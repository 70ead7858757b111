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
    "Bytes that the ranks of the busiest node hand to the transport per optimizer step, to ranks of their "
    "own node and to other nodes: rings follow the order of the ranks, collectives count as the transport "
    "implements them. The last three columns divide the bytes between nodes by the groups that send them: "
    "with hybrid sharding on full nodes only the replica groups send between nodes, except scalars such as "
    "the gradient norm."
)


def nodes_section(comparison: Comparison) -> Section | None:
    """A line for each cell, of its first run that was counted; None if every run was on one node."""
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
