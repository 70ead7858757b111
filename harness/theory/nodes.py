"""Which bytes of a collective stay within a node and which cross between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.theory.transports import transport_sent_bytes


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that one rank sends."""

    inside: float = 0.0
    """To ranks of its own node."""
    between: float = 0.0
    """To ranks of other nodes."""

    def __add__(self, other: NodeTraffic) -> NodeTraffic:
        return NodeTraffic(self.inside + other.inside, self.between + other.between)


def node_traffic(
    transport: str,
    op: str,
    payload_bytes: int,
    group_ranks: Sequence[int],
    rank: int,
    hosts: Mapping[int, str],
    *,
    phase: str = "",
) -> NodeTraffic:
    """What `rank` sends for a collective of its group on a ring in the order of the ranks.

    A ring sends everything to the next rank, so the host of that neighbour decides. Trees, which NCCL may
    choose on many nodes and gloo uses to broadcast, spread differently; their sum is the same. An all-to-all
    sends each peer as much. A message of a pipeline goes to the next rank, of the backward phase to the one
    before; of a tied weight's gradient, that the ends swap, one of two is taken to stay with a neighbour.
    Raises KeyError for a collective without a factor or a rank without a host.
    """
    size = len(group_ranks)
    if size == 1:
        return NodeTraffic()
    sent = transport_sent_bytes(transport, op, payload_bytes, size)
    if op == "all_to_all":
        inside = sum(hosts[peer] == hosts[rank] for peer in group_ranks) - 1
        return NodeTraffic(inside=sent * inside / (size - 1), between=sent * (size - 1 - inside) / (size - 1))
    direction = -1 if (op, phase) == ("send", "backward") else 1
    neighbour = group_ranks[(group_ranks.index(rank) + direction) % size]
    if hosts[neighbour] == hosts[rank]:
        return NodeTraffic(inside=sent)
    return NodeTraffic(between=sent)
