"""Predicted time of a step: computing, each collective, and what of it stays exposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.errors import HarnessError
from harness.forms.ddp import bucket_count
from harness.forms.families import gathers_weights, reduces_gradients
from harness.forms.flops import ModelGeometry, gpu_hours, kilowatt_hours, model_flops_per_token
from harness.forms.model.layout import DTYPE_BYTES
from harness.forms.network import EMULATED, guide_ratio, time_ratio, transport_sent_bytes
from harness.forms.tensor import local_workload
from harness.forms.terms import (
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    PADDING,
    RING_PASSES,
    Collective,
    ring_sent_bytes,
)
from harness.forms.workload import Workload
from harness.forms.zero import zero0
from harness.forms.zero.zero3 import fetching
from harness.plan.coverage import COMPILED, OPTIMIZER, require_speed
from harness.plan.hardware import Device, TimeConstants, TimeTerm, default_constants
from harness.plan.scenario import Scenario
from harness.plan.time.computing import (
    HOST_TERM,
    UPDATE_BYTES,
    UPDATE_ON_HOST,
    ComputingTime,
    Work,
    computing_time,
)

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
    inside: float
    """Of the links within a node."""
    between: float
    """Of all adapters of a node that the group uses; 0 on one node."""
    switched_share: float
    """Of the links within a node, that an all-reduce by their switches reaches; 0: they only pass on."""
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


def _transfer(collective: Collective, work: Work, device: Device, constants: TimeConstants) -> Transfer:
    workload, scenario = work.workload, work.scenario
    group = workload.group_ranks(collective.role, workload.rank)
    ranks = _pair(group, scenario.ranks_per_node) if collective.op in ("send", "recv") else group
    path = path_of(ranks, scenario, device, constants)
    calls = _calls(collective, workload)
    sent = transport_sent_bytes(scenario.transport, collective.op, collective.payload_bytes, path.ranks)
    op = EMULATED.get(scenario.transport, {}).get(collective.op, collective.op)
    if scenario.transport == "nccl":
        latency, wire = nccl_seconds(op, collective.payload_bytes, calls, path, constants)
    else:
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
        f"{(sent / wire if wire else path.bandwidth) / 1e9:.2f} GB/s",
    )  # fmt: skip


def nccl_seconds(op: str, size: int, calls: int, path: Path, constants: TimeConstants) -> tuple[float, float]:
    """Seconds of each of `calls` and of their `size` bytes together, by the fastest of NCCL's ways."""
    if path.ranks == 1:
        return 0.0, 0.0
    ring = ring_sent_bytes(op, size, path.ranks) / path.bandwidth
    within = min(ring, _wire_in_node(op, size, path)) if path.nodes == 1 else ring
    if constants.fitted:
        return call_latency(op, path, constants), min(within, _wire_of_tree(op, size, path))
    ways = [(_ring_latency(op, path, constants), ring), (low_latency(op, path), ring / LOW_LATENCY_SHARE)]
    if path.nodes == 1:
        ways.append((call_latency(op, path, constants), within))
    elif op == "all_reduce" and calls:
        place = math.floor(math.log2(max(size / calls, 64) / 64))
        share = TREE_SHARES[place] if place < len(TREE_SHARES) else 1.0
        ways.append((_tree_latency(path, constants), _wire_of_tree(op, size, path) / share))
    return min(ways, key=lambda way: calls * way[0] + way[1])


def _wire_in_node(op: str, size: int, path: Path) -> float:
    """Seconds for the bytes of a collective within a node, `size` of result.

    An all-reduce is added up by its switches (NVLS), if that is faster than by a ring: src/graph/tuning.cc,
    nvlsEfficiency and the 5 / 6 of its algorithm.
    """
    ring = ring_sent_bytes(op, size, path.members_per_node) / path.inside
    if op != "all_reduce" or not path.switched_share or path.members_per_node <= 2:
        return ring
    return min(ring, size / (path.inside * path.switched_share))


def _wire_of_tree(op: str, size: int, path: Path) -> float:
    """Of an all-reduce between nodes: up and down the tree; over two nodes each byte crosses once (the same
    file: bwIntra up to two nodes)."""
    if op != "all_reduce" or path.nodes == 1:
        return math.inf
    if path.nodes == 2:
        return max(_wire_in_node(op, size, path), size / path.between)
    return 2 * size / path.bandwidth


TREE_SHARES = (
    0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8,
    0.9, 0.9,
)  # fmt: skip
"""Of its bandwidth, that a tree reaches with messages of 64 B, 128 B and so on to 256 MiB: chunks are small
beside the way up and down (the same file, treeCorrectionFactor, protocol Simple)."""


SWITCHED = {"9": 0.85 * 5 / 6, "10": 0.74 * 5 / 6}
"""Major compute capability -> share, where each GPU of a node is linked to switches."""


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
    major = (device.capability or "").partition(".")[0]
    slowest = across if len(nodes) > 1 and members == 1 else min(inside, across)
    return Path(
        ranks=len(ranks),
        nodes=len(nodes),
        members_per_node=members,
        bandwidth=slowest if len(nodes) > 1 else inside,
        inside=inside,
        between=across if len(nodes) > 1 else 0.0,
        switched_share=SWITCHED.get(major, 0.0) if device.link in ("NVLink 4", "NVLink 5") else 0.0,
        link_step_seconds=constants.link_step_seconds,
        fabric_step_seconds=fabric.latency_seconds if fabric else 0.0,
    )


def call_latency(op: str, path: Path, constants: TimeConstants) -> float:
    """Seconds of a call without bytes: base + steps of the ring within and between nodes.

    NCCL, src/graph/tuning.cc, ncclTopoTuneModel: (n - 1) steps per pass, of which (nodes - 1) cross; small
    all-reduces go over a tree: 2 (log2 nodes + ranks of a node - 1) steps.
    """
    ring = _ring_latency(op, path, constants)
    return min(ring, _tree_latency(path, constants)) if op == "all_reduce" else ring


def _ring_latency(op: str, path: Path, constants: TimeConstants) -> float:
    passes = RING_PASSES.get(op, 1)
    between = passes * (path.nodes - 1)
    within = passes * (path.ranks - 1) - between
    return constants.call_seconds + within * path.link_step_seconds + between * path.fabric_step_seconds


def _tree_latency(path: Path, constants: TimeConstants) -> float:
    within = (path.members_per_node - 1) * path.link_step_seconds
    return constants.call_seconds + 2 * (within + math.ceil(math.log2(path.nodes)) * path.fabric_step_seconds)


LOW_LATENCY_SHARE = 1 / 4
"""Of a ring's bandwidth, that NCCL's protocol for small messages reaches (LL: every 4 bytes with a flag)."""
NETWORK_SECONDS = 14e-6
"""Of a step between nodes by NCCL's own table; what a network takes more, it takes by every protocol
(src/graph/tuning.cc, latencyInter)."""


def low_latency(op: str, path: Path) -> float:
    """Seconds of a call without bytes by that protocol: src/graph/tuning.cc, baseLat and hwLat of LL."""
    more = max(0.0, path.fabric_step_seconds - NETWORK_SECONDS)
    passes, several = RING_PASSES.get(op, 1), path.nodes > 1
    between = several * (2 * path.nodes if op == "all_reduce" else path.nodes - 1)
    step = 1e-6 if several else 0.6e-6  # beside a network it posts, which takes longer
    ring = 6.6e-6 + (passes * (path.ranks - 1) - between) * step + between * (2.7e-6 + more)
    levels = math.ceil(math.log2(path.nodes))
    tree = 6.8e-6 + 2 * ((path.members_per_node - 1) * 0.6e-6 + levels * (5.0e-6 + more))
    return min(ring, tree) if op == "all_reduce" else ring


def _calls(collective: Collective, workload: Workload) -> int:
    """How many calls move the payload; where the closed form leaves it open, by buckets or units."""
    if collective.calls is not None:
        return collective.calls
    family = workload.strategy.family
    if family == "ddp":
        return bucket_count(workload)
    if workload.strategy.zero_stage and collective.op != "all_gather":
        workload = local_workload(workload)
        gradients = workload.layout.parameter_count * DTYPE_BYTES[collective.dtype]
        passes = max(1, round(collective.payload_bytes / gradients))
        return zero0.buckets_filled(workload) * passes
    return max(1, len(workload.layout.units()))


def _shares(collective: Collective, work: Work, calls: int) -> list[float]:
    """What part of the payload each call moves: units of FSDP, modules of ZeRO-3, else equal parts."""
    sizes: tuple[int, ...] = ()
    family = work.workload.strategy.family
    if collective.op in ("all_gather", "reduce_scatter", "all_reduce") and calls > 1:
        if family in ("fsdp1", "fsdp2", "replicate"):
            sizes = work.unit_sizes
        elif family == "zero3" and collective.op == "all_gather":
            sizes = work.module_sizes
    times, rest = divmod(calls, len(sizes)) if sizes else (0, 1)
    if rest:
        return [1 / calls] * calls
    total = sum(sizes) * times
    return [size / total for size in sizes] * times


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """What runs at the same time."""

    gathers_ahead: bool
    """Weights of the next unit are gathered while this one computes."""
    reduces_beside: bool
    """Gradients are reduced while the backward pass goes on."""
    source: str


@dataclass(frozen=True, kw_only=True)
class UnitPass:
    """One unit in one direction: its weights arrive, it computes, its gradients leave."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def overlap_rule(workload: Workload) -> OverlapRule:
    """What the library of a strategy overlaps with these options and this preset."""
    family, on_gpu = local_workload(workload).strategy.family, workload.device != "cpu"
    ahead = beside = False
    match family:
        case "ddp":
            beside, source = True, "DDP reduces a bucket once it is full (torch, reducer.cpp)"
        case "fsdp1" | "fsdp2" | "replicate":
            ahead = on_gpu and workload.options.get("backward_prefetch") != "none"
            beside = on_gpu
            source = "FSDP gathers the next unit and reduces the last one on streams of their own" + (
                "" if on_gpu else "; a CPU has no streams, so it waits for each collective"
            )
        case "zero3":
            how = fetching(workload)
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is true by default at stage 3" + (
                "; like for like sets stage3_max_live_parameters to 0: nothing is gathered ahead"
                if not how.live
                else ""
            )
            ahead = on_gpu and how.live > 0 and how.ahead > 0
            beside = on_gpu and workload.options.get("overlap_comm") is not False
        case "single" | "pipeline":
            source = "layers and stages wait for what they exchange; replicas are averaged after the passes"
        case _:
            beside = on_gpu and family == "zero12" and workload.options.get("overlap_comm") is True
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is false by default below stage 3" + (
                "; true reduces bucket by bucket on a stream of its own (stage_1_and_2.py)" if beside else ""
            )
    return OverlapRule(gathers_ahead=ahead, reduces_beside=beside, source=source)


def exposed_seconds(
    work: Work, computing: ComputingTime, found: Sequence[Transfer], rule: OverlapRule
) -> float:
    """Seconds per step in which a rank communicates and does not compute, if hiding costs nothing."""
    gathers = [t for t in found if gathers_weights(t.collective)]
    reductions = [t for t in found if reduces_gradients(t.collective)]
    hideable = {id(t) for t in (*gathers, *reductions)}
    always = sum(t.seconds for t in found if id(t) not in hideable)
    count = work.workload.accumulation_steps
    # Where weights stay gathered between micro-steps, only the first one gathers in its forward pass.
    gathers_each = any(t.collective.term == FURTHER_FORWARD for t in gathers)
    reduces_each = any(t.collective.term == FURTHER_GRADIENTS for t in reductions)
    forward = sum(t.seconds for t in gathers if t.collective.phase == "forward")
    backward = sum(t.seconds for t in gathers if t.collective.phase == "backward") / count
    reduced = sum(t.seconds for t in reductions) / (count if reduces_each else 1)
    forward /= count if gathers_each else 1

    def micro_step(*, first: bool, last: bool) -> float:
        stages = _stages(
            work,
            computing,
            forward=forward if first or gathers_each else 0.0,
            backward=backward,
            reduced=reduced if last or reduces_each else 0.0,
        )
        return max(0.0, run_time(stages, rule) - computing.micro_step)

    if count == 1:
        return always + micro_step(first=True, last=True)
    ends = micro_step(first=True, last=False) + micro_step(first=False, last=True)
    return always + ends + (count - 2) * (micro_step(first=False, last=False) if count > 2 else 0.0)


def run_time(stages: Sequence[UnitPass], rule: OverlapRule) -> float:
    """Seconds of stages in order on one device and one network, each of which does one thing at a time.

    Ahead: the gather of a stage begins when the stage before begins to compute, after the network is free.
    """
    computed = network = begun = 0.0
    waiting = 0.0
    for stage in stages:
        if stage.gather:
            start = max(network, begun if rule.gathers_ahead else computed)
            arrived = network = start + stage.gather
        else:
            arrived = 0.0
        if waiting:
            # The reduction of the stage before was started after this gather.
            network = max(network, computed) + waiting
            waiting = 0.0
            if not rule.reduces_beside:
                arrived = max(arrived, network)
        begun = max(computed, arrived)
        computed = begun + stage.compute
        waiting = stage.reduce
    return max(computed, (max(network, computed) + waiting) if waiting else network)


def _stages(
    work: Work, computing: ComputingTime, *, forward: float, backward: float, reduced: float
) -> list[UnitPass]:
    """A micro-step as stages; seconds of communication are divided by the units' elements.

    Buckets of DDP and DeepSpeed hold what is ready: the output projection first, the embedding last. A unit
    of FSDP and ZeRO-3 that holds both is reduced last.
    """
    root, blocks, behind = work.unit_shares
    early = behind if local_workload(work.workload).strategy.family in ("ddp", "zero0", "zero12") else 0.0
    count = max(1, len(blocks))
    each = [UnitPass(compute=computing.block_forward / count, gather=share * forward) for share in blocks]
    found = [UnitPass(compute=0.0, gather=root * forward), *each, UnitPass(compute=computing.head_forward)]
    head = UnitPass(compute=computing.head_backward, gather=root * backward, reduce=early * reduced)
    back = [
        UnitPass(compute=computing.block_backward / count, gather=s * backward, reduce=s * reduced)
        for s in reversed(blocks)
    ]
    if not blocks:
        found.append(UnitPass(compute=computing.block_forward))
        back = [UnitPass(compute=computing.block_backward)]
    return [*found, head, *back, UnitPass(compute=0.0, reduce=(root - early) * reduced)]


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """One optimizer step of the slowest rank."""

    computing: tuple[TimeTerm, ...]
    communication: tuple[TimeTerm, ...]
    exposed_seconds: float
    """What of the communication does not hide behind computing, and what computing loses to the rest."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_utilization: float | None
    """Of the device's dense peak for the compute dtype, 0 to 1."""
    joules_per_step: float | None
    """Of all devices at their power limit: an upper bound."""
    guide_ratio: float | None = None
    """What decision guides compute for exposed communication (`harness.forms.network`)."""
    peak_ratio: float | None = None
    """Communication over computing, both at the peaks of data sheets: above 1 some is exposed in any case."""
    remarks: tuple[str, ...] = ()
    """What overlaps, and where the constants come from."""

    @property
    def computing_seconds(self) -> float:
        return sum(term.seconds for term in self.computing)

    @property
    def host_share(self) -> float:
        """Of the step, in which the device waits for the host to start operators."""
        return sum(term.seconds for term in self.computing if term.name == HOST_TERM) / self.step_seconds

    @property
    def host_update_share(self) -> float:
        """Of the step, in which the host updates what is offloaded."""
        update = sum(term.seconds for term in self.computing if term.name == UPDATE_ON_HOST)
        return update / self.step_seconds

    @property
    def communication_seconds(self) -> float:
        return sum(term.seconds for term in self.communication)


def predict_speed(scenario: Scenario, constants: TimeConstants | None = None) -> SpeedPrediction | None:
    """Predict a step; None without a device. `constants`: in place of the scenario's.

    step = computing + exposed + c (communication - exposed) + o, with c the contention and o the overhead.
    Raises HarnessError for several nodes without a fabric.
    """
    device = scenario.device
    if device is None:
        return None
    counted = (OPTIMIZER,) if scenario.job.optimizer.kind in UPDATE_BYTES else ()
    require_speed(scenario, covered=(COMPILED, *counted))
    constants = constants or scenario.constants or default_constants(device)
    found = (predict_work(Work(scenario, rank), device, constants) for rank in scenario.unlike_ranks)
    return max(found, key=lambda speed: speed.step_seconds)


def predict_work(work: Work, device: Device, constants: TimeConstants) -> SpeedPrediction:
    """The same for a step whose closed forms are there already."""
    scenario = work.scenario
    computing, found, exposed = _parts(work, device, constants)
    terms = computing.terms
    if constants.step_overhead_seconds > 0:
        terms = (*terms, TimeTerm("overhead", constants.step_overhead_seconds, "o", constants.origin))
    step = _step(computing, exposed, constants)
    tokens, peak = work.tokens_per_gpu, device.peak_flops.get(work.rate_name)
    flops = model_flops_per_token(_geometry(work))
    return SpeedPrediction(
        computing=terms,
        # A line per collective; padding joins what it pads.
        communication=tuple(
            TimeTerm(
                f"{t.collective.term} ({f'{t.collective.phase}, ' if t.collective.term == PADDING else ''}"
                f"{t.collective.op}, {t.path.name})",
                t.seconds, t.formula, work.collectives[1],
            )
            for t in found
        ),
        exposed_seconds=exposed,
        step_seconds=step,
        tokens_per_second_per_gpu=tokens / step,
        model_flops_utilization=flops * (tokens / step) / peak if peak else None,
        joules_per_step=device.watts * step * scenario.world_size if device.watts else None,
        guide_ratio=_guide_ratio(work, device, peak) if peak else None,
        peak_ratio=_peak_ratio(work, device, found, peak) if peak else None,
        remarks=(*((overlap_rule(work.workload).source,) if found else ()), f"constants: {constants.origin}"),
    )  # fmt: skip


def seconds_of_step(work: Work, device: Device, constants: TimeConstants) -> float:
    """The step alone, for fits that evaluate it often."""
    computing, _, exposed = _parts(work, device, constants)
    return _step(computing, exposed, constants)


def _step(computing: ComputingTime, exposed: float, constants: TimeConstants) -> float:
    return sum(term.seconds for term in computing.terms) + exposed + constants.step_overhead_seconds


def _parts(
    work: Work, device: Device, constants: TimeConstants
) -> tuple[ComputingTime, list[Transfer], float]:
    """Computing, transfers, and the seconds that communication adds to computing."""
    computing = computing_time(work, device, constants)
    found = [_transfer(collective, work, device, constants) for collective in work.collectives[0]]
    if not found:
        return computing, found, 0.0
    ideal = exposed_seconds(work, computing, found, overlap_rule(work.workload))
    hidden = max(0.0, sum(transfer.seconds for transfer in found) - ideal)
    return computing, found, ideal + constants.contention * hidden


def hours_per_billion_tokens(speed: SpeedPrediction, world_size: int) -> float:
    """Wall-clock hours in which all GPUs together train on 1e9 tokens."""
    return gpu_hours(speed.tokens_per_second_per_gpu * world_size, 1)


def gpu_hours_per_billion_tokens(speed: SpeedPrediction) -> float:
    """Hours of one GPU for 1e9 tokens: what is paid for."""
    return gpu_hours(speed.tokens_per_second_per_gpu, 1)


def kilowatt_hours_per_billion_tokens(speed: SpeedPrediction, world_size: int) -> float | None:
    """Energy of the GPUs at their power limit for 1e9 tokens: an upper bound; None: power unknown."""
    if speed.joules_per_step is None:
        return None
    watts = speed.joules_per_step / speed.step_seconds
    return kilowatt_hours(speed.tokens_per_second_per_gpu * world_size, watts)


def _geometry(work: Work) -> ModelGeometry:
    """Of the whole model, with adapters beside their frozen base."""
    scenario, model = work.scenario, work.scenario.model
    base = model.multiplying_parameters
    adapters = scenario.workload().layout.trained_count if work.is_adapted else 0
    prefixes = tuple(f"{name}." for name in model.layout.blocks)
    inside = sum(t.numel for t in model.layout.parameters if prefixes and t.name.startswith(prefixes))
    return ModelGeometry(
        multiplying_parameters=base + adapters,
        block_parameters=inside,
        layers=model.layers,
        attention_width=model.attention_width,
        sequence_length=scenario.job.data.sequence_length,
        frozen_parameters=base if work.is_adapted else 0,
    )


def _guide_ratio(work: Work, device: Device, peak: float) -> float | None:
    """The ratio of the guides, with the slowest link that the weights or gradients cross."""
    scenario, workload = work.scenario, work.workload
    ranks = workload.shards if scenario.strategy.facts.has_replicas else scenario.world_size
    if scenario.world_size == 1 or scenario.mesh.cuts_model or work.is_adapted:
        return None  # guides know training of all parameters
    return guide_ratio(
        scenario.strategy,
        ranks=ranks,
        parameters=scenario.model.parameters,
        sequence_length=scenario.job.data.sequence_length,
        micro_batch_size=scenario.micro_batch_size,
        accumulation_steps=scenario.accumulation_steps,
        peak_flops=peak,
        bandwidth=_ring_bandwidth(scenario, device, ranks),
    )


def _ring_bandwidth(scenario: Scenario, device: Device, ranks: int) -> float:
    """Peak of a ring: over nodes all adapters of a node together, but no more than its links."""
    if ranks <= scenario.ranks_per_node or scenario.fabric is None:
        return device.link_bandwidth
    return min(device.link_bandwidth, scenario.fabric.bandwidth_per_gpu * scenario.ranks_per_node)


def _peak_ratio(work: Work, device: Device, found: Sequence[Transfer], peak: float) -> float | None:
    if not found or work.is_adapted:
        return None
    # Each transfer over its own path, at the peak of its slowest link.
    at_peak = sum(
        t.collective.sent_bytes(work.workload) / _ring_bandwidth(work.scenario, device, t.path.ranks)
        for t in found
    )
    tokens = round(work.tokens_per_gpu)
    return time_ratio(at_peak, work.scenario.model.multiplying_parameters, tokens, peak, 1.0)
