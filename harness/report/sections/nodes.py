"""What runs on several nodes send within and between them."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.nodes import node_volumes
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes

COLUMNS = (
    Column("backend", "backend", align="left"),
    Column("nodes", "nodes"),
    Column("world_size", "ranks"),
    Column("inside_bytes_per_step", "inside MB/step", megabytes),
    Column("between_bytes_per_step", "between MB/step", megabytes),
)
ROLES = ("world", "shard", "replica")
"""Groups that have a column always; the others where they send between nodes."""
TEXT = (
    "Bytes that the ranks of the busiest node hand to the transport per optimizer step, to ranks of their "
    "own node and to other nodes: rings follow the order of the ranks, collectives count as the transport "
    "implements them. The last columns divide the bytes between nodes by the groups that send them: "
    "with hybrid sharding on full nodes only the replica groups send between nodes, except scalars such as "
    "the gradient norm."
)


def nodes_section(comparison: Comparison) -> Section | None:
    """A line for each cell, of its first run that was counted; None if every run was on one node."""
    found = []
    for group in comparison.groups:
        record = group.record
        of_runs = [node_volumes(row.record) for row in group.rows] if record.world.nodes > 1 else []
        volumes = next(filter(None, of_runs), [])
        if volumes:
            found.append((group, max(volumes, key=lambda volume: volume.between)))
    if not found:
        return None
    roles = list(dict.fromkeys([*ROLES, *(role for _, most in found for role in most.between_by_role)]))
    body = [
        [
            group.label,
            group.record.world.nodes,
            group.record.world.world_size,
            most.inside,
            most.between,
            *(most.between_by_role.get(role, 0.0) for role in roles),
        ]
        for group, most in found
    ]
    table = Table(key="nodes", columns=[*COLUMNS, *map(_column, roles)], rows=body)
    return Section("nodes", "Within and between nodes", [Paragraph(TEXT), table])


def _column(role: str) -> Column:
    """Of the groups of ranks that one role names: 'data+sequence' lies along both dimensions."""
    key = f"between_{role.replace('+', '_')}_bytes_per_step"
    return Column(key, "by all ranks MB" if role == "world" else f"by {role} groups MB", megabytes)
