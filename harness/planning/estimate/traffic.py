"""Bytes that a rank sends in a step, by collective, and how many of them leave its node."""

from __future__ import annotations

from dataclasses import dataclass

from harness.forms import fsdp, zero
from harness.forms.network import EMULATED, transport_sent_bytes
from harness.forms.terms import Collective, ring_formula
from harness.forms.workload import Role, Workload
from harness.planning.scenario import Scenario
from harness.planning.work import Work


@dataclass(frozen=True, kw_only=True)
class TrafficLine:
    """Calls of one kind that have one cause, in one step of one rank."""

    term: str
    phase: str
    op: str
    dtype: str
    role: Role
    group_size: int
    calls: int | None
    """None: it depends on the order in which gradients become ready. 0: part of the calls of another line."""
    payload_bytes: int
    sent_bytes: float
    between_bytes: float
    """Of `sent_bytes`, to other nodes; on average over the ranks of a node."""
    formula: str
    source: str


def step_traffic(scenario: Scenario) -> list[TrafficLine]:
    """Every collective of an ordinary step; empty on one rank.

    A ring in the order of the ranks sends everything to the next rank (`harness.forms.network`): the last
    rank of a node that the ring leaves sends it all to another node, the others send it within theirs.
    """
    if scenario.world_size == 1:
        return []
    work = Work(scenario)
    workload = work.workload
    found, source = work.collectives
    shares = {role: crossing_share(workload, role) for role in {c.role for c in found}}
    return [_line(c, workload, scenario.transport, shares[c.role], source) for c in found]


def _line(
    collective: Collective, workload: Workload, transport: str, share: float, source: str
) -> TrafficLine:
    size = workload.group_size(collective.role)
    sent = transport_sent_bytes(transport, collective.op, collective.payload_bytes, size)
    runs = EMULATED.get(transport, {}).get(collective.op, collective.op)
    return TrafficLine(
        term=collective.term,
        phase=collective.phase,
        op=collective.op,
        dtype=collective.dtype,
        role=collective.role,
        group_size=size,
        calls=collective.calls,
        payload_bytes=collective.payload_bytes,
        sent_bytes=sent,
        between_bytes=sent * share,
        formula=ring_formula(runs, collective.payload_bytes, size),
        source=source,
    )


def communication_dtypes(workload: Workload) -> tuple[str, str]:
    """Dtypes in which weights are gathered and gradients reduced, as the closed forms have them.

    DDP and a bare replica reduce in the dtype of the weights that train.
    """
    if workload.strategy.family in ("single", "ddp", "pipeline"):
        return workload.master_dtype, workload.master_dtype
    library = fsdp if workload.strategy.zero_stage is None else zero
    return workload.compute_dtype, library.reduce_dtype(workload)


def crossing_share(workload: Workload, role: Role) -> float:
    """Ranks whose next rank in the ring of a group is on another node, over all ranks."""
    world, shards = workload.world_size, workload.group_size("shard")
    per_node = workload.ranks_per_node or world
    if per_node >= world:
        return 0.0
    if workload.mesh is not None and workload.mesh.shares_samples:
        rings = workload.mesh.groups(role)
        hops = (hop for ring in rings for hop in zip(ring, ring[1:] + ring[:1], strict=True))
        return sum(rank // per_node != after // per_node for rank, after in hops) / world
    crossing = sum(rank // per_node != _next(rank, role, world, shards) // per_node for rank in range(world))
    return crossing / world


def _next(rank: int, role: Role, world: int, shards: int) -> int:
    if role == "shard":
        first = rank - rank % shards
        return first + (rank - first + 1) % shards
    return (rank + (shards if role == "replica" else 1)) % world
