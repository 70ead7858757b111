"""Seconds that each collective of a step takes: latency of its calls, and bytes over the slowest link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.errors import HarnessError
from harness.forms import zero
from harness.forms.ddp import bucket_count
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.network import EMULATED, transport_sent_bytes
from harness.forms.part import within
from harness.forms.terms import RING_PASSES, Collective
from harness.forms.workload import Workload
from harness.plan.constants import TimeConstants
from harness.plan.device import Device
from harness.plan.scenario import Scenario
from harness.plan.work import Work

LATENCY_HIDES = frozenset({"gloo"})
"""Transports whose latency is a wait for processors, which goes on while bytes move: only the longer
is felt. `harness fabric` over links of known speed: an all-reduce of 4 CPU ranks takes 6 ms for 1 KB, and for
1 MB at 1 Gbit/s 13.3 ms, of which the wire alone needs 13.4. NCCL adds them up (src/graph/tuning.cc)."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way that a collective's bytes take from each rank of a ring to the next."""

    ranks: int
    nodes: int
    members_per_node: int
    bandwidth: float
    """Bytes per second, of the slowest link."""
    link_step_seconds: float
    fabric_step_seconds: float

    @property
    def name(self) -> str:
        return "between nodes" if self.nodes > 1 else "within nodes"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of the closed forms, in seconds per step."""

    collective: Collective
    path: Path
    calls: int
    seconds: float
    formula: str


def transfers(work: Work, device: Device, constants: TimeConstants) -> list[Transfer]:
    """Seconds of every collective of a step. Raises HarnessError for several nodes without a fabric."""
    return [_transfer(collective, work, device, constants) for collective in work.collectives[0]]


def _transfer(collective: Collective, work: Work, device: Device, constants: TimeConstants) -> Transfer:
    workload, scenario = work.workload, work.scenario
    group = workload.group_ranks(collective.role, workload.rank)
    ranks = _pair(group, scenario.ranks_per_node) if collective.op in ("send", "recv") else group
    path = path_of(ranks, scenario, device, constants)
    calls = _calls(collective, workload)
    sent = transport_sent_bytes(scenario.transport, collective.op, collective.payload_bytes, path.ranks)
    op = EMULATED.get(scenario.transport, {}).get(collective.op, collective.op)
    latency = call_latency(op, path, constants) if path.ranks > 1 else 0.0
    wire = sent / path.bandwidth
    if scenario.transport in LATENCY_HIDES and calls:
        shares = _shares(collective, work, calls)
        seconds, sign = sum(max(latency, share * wire) for share in shares), "or, if longer,"
    else:
        seconds, sign = calls * latency + wire, "+"
    return Transfer(
        collective=collective, path=path, calls=calls, seconds=seconds,
        formula=f"{calls} x {latency * 1e6:.0f} us {sign} {sent / 1e6:,.1f} MB / "
        f"{path.bandwidth / 1e9:.2f} GB/s",
    )  # fmt: skip


def _pair(group: Sequence[int], ranks_per_node: int) -> list[int]:
    """Neighbours in a pipeline, on two nodes if any are: stages wait for the slowest message."""
    pairs = [list(pair) for pair in pairwise(group)]
    crossing = (pair for pair in pairs if len({rank // ranks_per_node for rank in pair}) > 1)
    return next(crossing, pairs[0] if pairs else list(group))


def path_of(ranks: Sequence[int], scenario: Scenario, device: Device, constants: TimeConstants) -> Path:
    """The links of a ring over a group; several rings share a node's adapters, one ring per rank of it."""
    nodes = {rank // scenario.ranks_per_node for rank in ranks}
    members = math.ceil(len(ranks) / len(nodes))
    inside = device.link_bandwidth * constants.link_share
    fabric = scenario.fabric
    if len(nodes) > 1 and fabric is None:
        raise HarnessError(
            f"{scenario.nodes} nodes need a network: name one with --fabric, or set --gpus-per-node so that "
            "one node holds all ranks"
        )
    across = inside if fabric is None else fabric.bandwidth_per_gpu * members * constants.fabric_share
    slowest = across if len(nodes) > 1 and members == 1 else min(inside, across)
    return Path(
        ranks=len(ranks),
        nodes=len(nodes),
        members_per_node=members,
        bandwidth=slowest if len(nodes) > 1 else inside,
        link_step_seconds=constants.link_step_seconds,
        fabric_step_seconds=fabric.latency_seconds if fabric else 0.0,
    )


def call_latency(op: str, path: Path, constants: TimeConstants) -> float:
    """Seconds of a call without bytes: base + steps of the ring within and between nodes.

    NCCL, src/graph/tuning.cc, ncclTopoTuneModel: (n - 1) steps per pass, of which (nodes - 1) cross; small
    all-reduces go over a tree: 2 (log2 nodes + ranks of a node - 1) steps.
    """
    passes = RING_PASSES.get(op, 1)
    between = passes * (path.nodes - 1)
    within = passes * (path.ranks - 1) - between
    ring = within * path.link_step_seconds + between * path.fabric_step_seconds
    tree = 2 * (
        (path.members_per_node - 1) * path.link_step_seconds
        + math.ceil(math.log2(path.nodes)) * path.fabric_step_seconds
    )
    return constants.call_seconds + (min(ring, tree) if op == "all_reduce" else ring)


def _calls(collective: Collective, workload: Workload) -> int:
    """How many calls move the payload; where the closed form leaves it open, by buckets or units."""
    if collective.calls is not None:
        return collective.calls
    family = workload.strategy.family
    if family == "ddp":
        return bucket_count(workload)
    if workload.strategy.zero_stage and collective.op != "all_gather":
        workload = within(workload)
        gradients = workload.layout.parameter_count * DTYPE_BYTES[collective.dtype]
        passes = max(1, round(collective.payload_bytes / gradients))
        return zero.buckets_filled(workload) * passes
    return max(1, len(workload.layout.units()))


def _shares(collective: Collective, work: Work, calls: int) -> list[float]:
    """What part of the payload each call moves: units of FSDP, modules of ZeRO-3, else equal parts."""
    sizes: tuple[int, ...] = ()
    family = work.workload.strategy.family
    if collective.op in ("all_gather", "reduce_scatter", "all_reduce") and calls > 1:
        if family in ("fsdp1", "fsdp2"):
            sizes = work.unit_sizes
        elif family == "zero3" and collective.op == "all_gather":
            sizes = work.module_sizes
    times, rest = divmod(calls, len(sizes)) if sizes else (0, 1)
    if rest:
        return [1 / calls] * calls
    total = sum(sizes) * times
    return [size / total for size in sizes] * times
