"""Communication within and between the nodes of one run, from its counted collectives."""

from __future__ import annotations

from dataclasses import dataclass

from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import STEP_PHASES
from harness.judge.measures import all_ranks_counted
from harness.record import Record


@dataclass(frozen=True, kw_only=True)
class NodeVolume:
    """What the ranks of one node send per optimizer step, bytes."""

    host: str
    inside: float
    between: float
    between_by_role: dict[str, float]
    """By what the group is for: world, shard, replica, or dimensions of ranks that share samples."""


def node_volumes(record: Record) -> list[NodeVolume]:
    """One for each node in the order of the ranks; empty where nothing was counted.

    Counts what the transport really sends, emulated collectives included (`harness.forms.network`).
    """
    probed = record.windows.probed if record.windows else 0
    hosts = {part.rank: part.host for part in record.ranks}
    if not probed or len(hosts) < record.world.world_size or not all_ranks_counted(record):
        return []
    totals: dict[str, dict[str, NodeTraffic]] = {host: {} for host in dict.fromkeys(hosts.values())}
    for row in record.comm:
        if row.phase not in STEP_PHASES:
            continue
        traffic = node_traffic(
            record.world.collectives,
            row.op,
            row.payload_bytes,
            row.group_ranks,
            row.rank,
            hosts,
            phase=row.phase,
        )
        by_role = totals[hosts[row.rank]]
        by_role[row.role] = by_role.get(row.role, NodeTraffic()) + traffic
    return [
        NodeVolume(
            host=host,
            inside=sum(traffic.inside for traffic in by_role.values()) / probed,
            between=sum(traffic.between for traffic in by_role.values()) / probed,
            between_by_role={
                role: traffic.between / probed for role, traffic in by_role.items() if traffic.between
            },
        )
        for host, by_role in totals.items()
    ]
