"""What is predicted of a scenario: memory in a step and while weights load, whether it fits, and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, TypeVar

from packaging.version import Version

from harness.errors import HarnessError
from harness.forms import zero0
from harness.forms.activations import ActivationProfile
from harness.forms.fsdp import units as fsdp
from harness.forms.layout import DTYPE_BYTES
from harness.forms.network import EMULATED, transport_sent_bytes
from harness.forms.peak_memory.families import least_peak, peak_moments
from harness.forms.peak_memory.step import Phase
from harness.forms.pipeline import bubble_of
from harness.forms.terms import STATE_KINDS, Collective, ModelStates, Term, by_kind, ring_formula
from harness.forms.textbook import gathers_updated, textbook_sent_bytes, textbook_states
from harness.forms.workload import Role, Workload
from harness.forms.zero3 import own_settings
from harness.judge.wording import CellName
from harness.plan.hardware import STATES_SHARE, MemoryVerdict
from harness.plan.model import mixture_of_experts
from harness.plan.profiles import Trace, activation_profile
from harness.plan.scenario import (
    Scenario,
    neighbours,
    why_between,
    why_memory_unknown,
)
from harness.plan.step_time import SpeedPrediction, Work, predict_speed

NCCL_NEIGHBOUR_BYTES = (2 + 10) * 2**20
"""Of one channel to one neighbour and from it: buffers of all protocols, 4 MiB, 4.7 MiB (LL128) and 0.5 MiB
(LL), on one side, the header on the other, in units of 2 MiB (NCCL 2.30, src/transport/p2p.cc)."""
NCCL_CHANNELS = {"NVLink": 24, "Infinity Fabric": 24}
"""By kind of link within a node (A100: 12 rings, each twice)."""
OTHER_CHANNELS = 4


def nccl_bytes(scenario: Scenario) -> int:
    """Bytes of one communicator: on each channel a ring, and a chain within the node, which its trees are.

    On average over the channels a rank has 2 (n - 1) / n neighbours in a chain of n. Published: 544 MiB on 2
    A100 and 688 on 4 (NVIDIA/nccl issue 964; 576 and 720 by this), about 1 GB on 8 H100, 4.3 GB after an
    all-to-all (issue 1685).
    """
    link = scenario.device.link if scenario.device else "NVLink"
    channels = next((n for kind, n in NCCL_CHANNELS.items() if link.startswith(kind)), OTHER_CHANNELS)
    ranks = scenario.ranks_of_node
    return round(channels * NCCL_NEIGHBOUR_BYTES * (1 + 2 * (ranks - 1) / ranks))


HANDLES = 2
"""Of cuBLAS: of the thread that runs the forward pass, and of autograd's."""


def workspaces(scenario: Scenario) -> Iterator[Term]:
    """What cuBLAS keeps of torch's allocator from the first product on, on GPUs of NVIDIA."""
    device = scenario.device
    if scenario.torch_device == "cpu" or device is None or device.capability is None:
        return
    is_large = scenario.job.training.deterministic or Version(device.capability) >= Version("9.0")
    yield Term(
        kind="buffers", name="cuBLAS's workspaces", bytes=int(HANDLES * (32 if is_large else 8.125) * 2**20),
        formula="2 handles x 32 MiB from Hopper on and where kernels are deterministic, else x 8.125 MiB",
        source="torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp; measured on an H200",
    )  # fmt: skip


def device_overhead(scenario: Scenario) -> Iterator[Term]:
    """CUDA context, NCCL's buffers and fragmentation; nothing on a CPU. Estimates, unlike the peak."""
    if scenario.torch_device == "cpu":
        return
    if scenario.device is not None:
        yield Term(
            kind="buffers", name="context", bytes=scenario.device.context_bytes, formula="of the device",
            source=scenario.device.source,
        )  # fmt: skip
    if scenario.world_size > 1 and scenario.transport == "nccl":
        communicators = 2 if scenario.strategy.facts.has_replicas else 1
        yield Term(
            kind="communication", name="NCCL's buffers",
            bytes=communicators * nccl_bytes(scenario),
            formula="communicators x channels x 12 MiB x (1 + 2 (n - 1) / n); 24 channels on NVLink, else 4",
            source="NCCL 2.30, src/transport/p2p.cc; within 6 % of NVIDIA/nccl issue 964",
        )  # fmt: skip


MomentName = Literal["forward/backward", "gradient reduction", "optimizer step"]


PHASES: dict[MomentName, tuple[Phase, ...]] = {
    "forward/backward": ("forward", "backward"),
    "gradient reduction": ("reduction",),
    "optimizer step": ("step",),
}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One moment of an ordinary step at its fullest."""

    name: MomentName
    terms: tuple[Term, ...]

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return by_kind(term for term in self.terms if not term.host)

    @property
    def device_bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Memory of the rank that needs most."""

    moments: tuple[Moment, ...]
    overhead: tuple[Term, ...] = ()
    """Outside of the allocator's peak: fragmentation, CUDA context, NCCL's buffers."""
    host_bytes_per_node: int = 0

    @cached_property
    def decisive(self) -> Moment:
        """The moment with the highest peak."""
        return max(self.moments, key=lambda moment: moment.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """What the allocator's peak will say (max_memory_allocated)."""
        return self.decisive.device_bytes

    @property
    def device_bytes(self) -> int:
        """What nvidia-smi will say."""
        return self.peak_bytes + sum(term.bytes for term in self.overhead if not term.host)


def predict_memory(
    scenario: Scenario, trace: Trace | None = None, *, rank: int | None = None
) -> MemoryPrediction:
    """Predict for a rank; None: the one that needs most. `trace`: how to trace a model of which there is no
    profile yet.

    Raises HarnessError where a model has to be traced and cannot be, and for settings that no one modelled.
    """
    profile = _profile(scenario, trace)
    peaks = max(
        (
            peak_moments(scenario.workload(rank), profile)
            for rank in (scenario.unlike_ranks if rank is None else (rank,))
        ),
        key=lambda moments: max(moment.bytes for moment in moments.values()),
    )
    moments = []
    for name, phases in PHASES.items():
        if there := [peaks[phase] for phase in phases if phase in peaks]:
            held = max(there, key=lambda moment: moment.bytes).held
            terms = (replace(term, bytes=count) for term, count in held.items())
            moments.append(Moment(name=name, terms=(*terms, *workspaces(scenario))))
    return MemoryPrediction(
        moments=tuple(moments),
        overhead=tuple(device_overhead(scenario)),
        host_bytes_per_node=host_bytes(scenario),
    )


def least_memory(scenario: Scenario, trace: Trace | None = None) -> int:
    """Bytes of the device below which no prediction lies: much sooner known; 0 where none is made."""
    try:
        least = least_peak(scenario.workload(), _profile(scenario, trace))
    except HarnessError:
        return 0
    return least + sum(term.bytes for term in device_overhead(scenario) if not term.host)


def _profile(scenario: Scenario, trace: Trace | None = None) -> ActivationProfile:
    """Raises HarnessError where the memory of a scenario has no prediction."""
    if (reason := why_memory_unknown(scenario)) is not None:
        raise HarnessError(reason)
    if scenario.strategy.zero_stage == 3 and (own := own_settings(scenario.workload())):
        raise HarnessError(f"a step of ZeRO-3 with {', '.join(own)} is not modelled")
    return activation_profile(scenario, trace)


def memory_bounds(
    scenario: Scenario, predict: Callable[[Scenario], MemoryPrediction] = predict_memory
) -> tuple[MemoryPrediction, MemoryPrediction] | None:
    """The least and the most that a scenario needs which is not predicted itself; None: not known."""
    found = neighbours(scenario)
    if found is None:
        return None
    try:
        least, most = map(predict, found)
    except HarnessError:
        return None
    return (least, most) if least.peak_bytes <= most.peak_bytes else None


def host_bytes(scenario: Scenario) -> int:
    """Bytes of states in host memory, over all ranks of a node."""
    if scenario.torch_device == "cpu":
        return 0
    per_rank = sum(term.bytes for term in scenario.states.terms if term.host)
    return per_rank * scenario.ranks_of_node


def loading_bytes(scenario: Scenario) -> int:
    """The least host memory of the node that needs most while its ranks load their weights.

    With 'full' each rank builds the whole model in fp32 (`rank.models.model.draw_model`). Else a rank holds
    its part of the weights, on the CPU or offloaded; the whole model is built once on a node if it comes from
    `model.factory` or a rank hands it to the others. What is drawn or read at once, and what libraries take,
    come on top.
    """
    model, job, ranks = scenario.model, scenario.job, scenario.ranks_of_node
    is_whole = model.whole_because is not None or job.why_whole(scenario.loading) is not None
    how = scenario.strategy.loading(
        "full" if is_whole else scenario.loading, ranks=scenario.world_size,
        efficient=bool(scenario.options.get("cpu_ram_efficient_loading")),
    )  # fmt: skip
    whole, on_cpu = 4 * model.layout.parameter_count, scenario.torch_device == "cpu"
    if how == "full":
        return ranks * whole
    held = sum(t.bytes for t in scenario.states.terms if t.kind == "weights" and (on_cpu or t.host))
    is_factory = job.model.factory is not None and not job.model.reads_checkpoint
    return max(ranks * held, whole if scenario.strategy.through_accelerate or is_factory else 0)


T = TypeVar("T")
FARTHEST_BOUNDS = 3
"""Bounds that are farther apart than this factor say nothing."""
NO_DEVICE = "no GPU was named (--gpu)"


@dataclass(frozen=True, kw_only=True)
class Predictors:
    """What predicts; others in tests."""

    memory: Callable[[Scenario], MemoryPrediction] = predict_memory
    speed: Callable[[Scenario], SpeedPrediction | None] = predict_speed
    least: Callable[[Scenario], int] = lambda _: 0
    """Bytes of the device below which `memory` does not lie, sooner known than that."""

    @classmethod
    def traced_by(cls, trace: Trace | None) -> Predictors:
        """A model that has no profile is traced so, when it is asked for; None: in a new process."""
        return cls(memory=partial(predict_memory, trace=trace), least=partial(least_memory, trace=trace))


@dataclass(frozen=True, kw_only=True)
class TrafficLine:
    """Calls of one kind that have one cause, in one step of one rank."""

    collective: Collective
    group_size: int
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
    work, transport = Work(scenario), scenario.transport
    workload, (found, source) = work.workload, work.collectives
    shares = {role: crossing_share(workload, role) for role in {c.role for c in found}}
    lines = []
    for one in found:
        size = workload.group_size(one.role)
        sent = transport_sent_bytes(transport, one.op, one.payload_bytes, size)
        runs = EMULATED.get(transport, {}).get(one.op, one.op)
        formula = ring_formula(runs, one.payload_bytes, size)
        lines.append(
            TrafficLine(
                collective=one, group_size=size, sent_bytes=sent, between_bytes=sent * shares[one.role],
                formula=formula, source=source,
            )
        )  # fmt: skip
    return lines


def crossing_share(workload: Workload, role: Role) -> float:
    """Ranks whose next rank in the ring of a group is on another node, over all ranks."""
    world, shards = workload.world_size, workload.group_size("shard")
    per_node = workload.ranks_per_node or world
    if per_node >= world:
        return 0.0
    if workload.mesh is not None and workload.mesh.shares_samples:
        rings = workload.mesh.groups(role)
        hops = [hop for ring in rings for hop in zip(ring, ring[1:] + ring[:1], strict=True)]
    elif role == "shard":
        hops = [(rank, rank - rank % shards + (rank % shards + 1) % shards) for rank in range(world)]
    else:
        hops = [(rank, (rank + (shards if role == "replica" else 1)) % world) for rank in range(world)]
    return sum(rank // per_node != after // per_node for rank, after in hops) / world


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A strategy on some ranks, of the rank that needs most; None where there is no prediction, with the
    reason."""

    scenario: Scenario | None = None
    """None: the job cannot run so."""
    named: CellName | None = None
    """Then what was asked for."""
    unsupported: str | None = None
    """And why it cannot."""
    memory: MemoryPrediction | None = None
    memory_unknown: str | None = None
    memory_bounds: tuple[MemoryPrediction, MemoryPrediction] | None = None
    """Of a peak that is not predicted, the least and the most of which are; None: they are not known."""
    speed: SpeedPrediction | None = None
    speed_unknown: str | None = None
    traffic: tuple[TrafficLine, ...] = ()
    traffic_unknown: str | None = None

    @property
    def planned(self) -> Scenario:
        """Its scenario, which it must have."""
        assert self.scenario is not None
        return self.scenario

    @property
    def cell(self) -> CellName:
        if self.scenario is None:
            assert self.named is not None
            return self.named
        return CellName(self.scenario.label, self.scenario.world_size)

    @property
    def label(self) -> str:
        """The backend with its options."""
        return self.cell.label

    @property
    def backend(self) -> str:
        """The backend without its options."""
        return self.label.partition(":")[0]

    @property
    def world_size(self) -> int:
        return self.cell.world_size

    @property
    def offload(self) -> str:
        """'none', 'optimizer' or 'cpu'."""
        return str(self.planned.options.get("offload", "none"))

    @property
    def checkpointing(self) -> bool | str:
        return self.planned.job.training.activation_checkpointing

    @property
    def verdict(self) -> MemoryVerdict | None:
        """None: no GPU, or memory not predicted: model states alone fit, or of bounds only the less."""
        if self.scenario is None or self.scenario.device is None:
            return None
        if self.memory is not None:
            return self.held_against_limit(self.memory.device_bytes)
        if self.memory_bounds is not None:  # However far apart: what not even the least fits is refused.
            least, most = (self.held_against_limit(bound.device_bytes) for bound in self.memory_bounds)
            return most if most.fits else least if not least.fits else None
        alone = self.held_against_limit(self.state_bytes(*STATE_KINDS) or 0)
        return None if alone.fits else alone

    @property
    def fits(self) -> bool:
        """Whether it is predicted to, if only barely; of a mixture of experts, whether states leave room."""
        return self.states_leave_room if self.verdict is None else self.verdict.fits

    @property
    def is_roomy(self) -> bool:
        """Whether it is predicted to fit, and not barely."""
        return self.fits and not self.barely_fits

    @property
    def barely_fits(self) -> bool:
        return self.verdict is not None and self.verdict.barely_fits

    @property
    def leaves_room(self) -> bool:
        """Whether it fits with room for fragmentation and the error of a prediction."""
        return self.verdict is not None and self.verdict.leaves_room

    @property
    def is_tight(self) -> bool:
        """Whether it fits so closely that the error of a prediction may decide."""
        return self.verdict is not None and self.verdict.answer == "close"

    @property
    def margin_bytes(self) -> int:
        """What stays free at most needs; negative: what is missing."""
        return self.there_bytes - self.needed_bytes

    @property
    def most_memory(self) -> MemoryPrediction | None:
        """What is predicted, or of bounds the most; None: neither is known."""
        return self.memory or (self.memory_bounds[1] if self.memory_bounds else None)

    @property
    def needed_bytes(self) -> int:
        """At most; where that is not known, of model states alone."""
        most = self.most_memory
        return self.held_beside_activations if most is None else most.device_bytes

    @property
    def needed_between(self) -> tuple[int, ...]:
        """Bytes that it needs, or the least and the most of near bounds, or the most of others; empty: not
        known."""
        known = (self.near_bounds if self.memory is None else self.memory_bounds) or (self.most_memory,)
        return tuple(memory.device_bytes for memory in known if memory is not None)

    @property
    def host_bytes_per_node(self) -> int:
        """0: nothing lies there, or that is not known."""
        if self.states_leave_room and self.scenario is not None:
            return host_bytes(self.scenario)
        return 0 if self.most_memory is None else self.most_memory.host_bytes_per_node

    @property
    def there_bytes(self) -> int:
        """The device's memory."""
        assert self.planned.device is not None
        return self.planned.device.memory_bytes

    def held_against_limit(self, needed_bytes: int) -> MemoryVerdict:
        """What is needed beside what there is."""
        return MemoryVerdict(needed_bytes=needed_bytes, device_bytes=self.there_bytes)

    @property
    def states(self) -> ModelStates | None:
        return None if self.scenario is None else self.scenario.states

    def state_bytes(self, *kinds: str) -> int | None:
        """Model states of some kinds on the device, between backward pass and update; None: not known."""
        if self.scenario is None or (self.scenario.states.unknown is not None and "optimizer" in kinds):
            return None
        return sum(self.scenario.held_states.get(kind, 0) for kind in kinds)

    @property
    def states_leave_room(self) -> bool:
        """Whether states of a mixture of experts, of which no more is known, leave room on the device."""
        if self.scenario is None or self.memory or self.memory_bounds or not self.scenario.device:
            return False
        is_mixture = mixture_of_experts(self.scenario.model.config) and self.scenario.states.unknown is None
        return is_mixture and self.held_beside_activations <= STATES_SHARE * self.there_bytes

    @property
    def held_beside_activations(self) -> int:
        """Bytes of model states; where FSDP keeps weights gathered after the forward pass, or adds up
        gradients between micro-steps, of these too, whole."""
        states, strategy = self.planned.held_states, self.planned.strategy
        held = self.state_bytes(*STATE_KINDS) or 0
        if strategy.zero_stage is not None or not strategy.of_family.gathers_as_it_runs:
            return held
        workload, whole = self.planned.workload(), 0
        if strategy.sharding in ("grad-op", "hybrid-grad-op"):
            whole += workload.layout.parameter_count * DTYPE_BYTES[workload.compute_dtype]
        if workload.accumulation_steps > workload.reductions:
            whole += workload.layout.trained_count * DTYPE_BYTES[fsdp.reduce_dtype(workload)]
        return max(held, held - states.get("gradients", 0) + whole)

    @property
    def near_bounds(self) -> tuple[MemoryPrediction, MemoryPrediction] | None:
        """Bounds that say something: they lie within a factor of `FARTHEST_BOUNDS`."""
        if self.memory_bounds is None:
            return None
        least, most = self.memory_bounds
        return self.memory_bounds if most.peak_bytes <= FARTHEST_BOUNDS * least.peak_bytes else None

    @property
    def peak_bytes_between(self) -> tuple[int, int] | None:
        """Bounds, in bytes, of a peak that is not predicted itself."""
        if self.near_bounds is None:
            return None
        least, most = self.near_bounds
        return least.peak_bytes, most.peak_bytes

    def most_bytes(self, kind: str) -> int | None:
        """The most of a kind at any of the three moments."""
        if self.memory is None:
            return None
        return max(moment.kinds.get(kind, 0) for moment in self.memory.moments)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """0 where no speed is predicted."""
        return 0.0 if self.speed is None else self.speed.tokens_per_second_per_gpu

    @property
    def sent_bytes(self) -> float | None:
        """None: not known."""
        return None if self.traffic_unknown else sum(line.sent_bytes for line in self.traffic)

    @property
    def between_bytes(self) -> float | None:
        """Part of `sent_bytes` that goes to other nodes; None: not known."""
        return None if self.traffic_unknown else sum(line.between_bytes for line in self.traffic)

    @property
    def textbook_state_bytes(self) -> float | None:
        """Model states as the ZeRO paper counts them (`harness.forms.textbook`)."""
        scenario = self.scenario
        if scenario is None or scenario.mesh.shares_samples or scenario.states.unknown:
            return None
        workload = scenario.workload()
        parts = scenario.shard_size or scenario.world_size
        if scenario.mesh.model_parts > 1:
            parts = scenario.mesh.model_parts
        held = textbook_states(
            scenario.strategy.stage,
            workload.layout.parameter_count,
            parts,
            scenario.job.training.held_precision,
            trained=workload.layout.trained_count,
            moments=scenario.job.optimizer.moments,
        )
        return sum(held.values())

    @property
    def textbook_sent_bytes(self) -> float | None:
        """Ring bytes per step as the ZeRO and FSDP papers count them, in the dtypes of this strategy."""
        if self.scenario is None or self.scenario.mesh.shares_samples:
            return None
        workload = self.scenario.workload()
        weights = reduced = workload.master_dtype  # DDP and a bare replica reduce in the dtype that trains
        if not workload.strategy.of_family.autocasts:
            library = fsdp if workload.strategy.zero_stage is None else zero0
            weights, reduced = workload.compute_dtype, library.reduce_dtype(workload)
        return textbook_sent_bytes(
            workload.strategy.sharding,
            workload.layout.parameter_count,
            workload.world_size,
            weight_bytes=DTYPE_BYTES[weights],
            reduce_bytes=DTYPE_BYTES[reduced],
            shard_size=workload.shards,
            trained=workload.layout.trained_count,
            after_update=gathers_updated(workload.strategy),
            second_copy_ranks=workload.second_copy_ranks,
        )

    @property
    def bubble(self) -> float | None:
        """Share of the passes that ranks of a pipeline wait by its schedule; None: it is none."""
        if self.scenario is None or not self.scenario.strategy.facts.cuts_layers:
            return None
        return bubble_of(self.scenario.workload())


P = TypeVar("P", bound=Prediction)


def predict(scenario: Scenario, by: Predictors | None = None, *, timed: bool = True) -> Prediction:
    """Memory, or its bounds, and speed; not `timed`: no speed. What has no prediction says why."""
    by = by or Predictors()
    memory, unknown = tried(lambda: by.memory(scenario), why_memory_unknown(scenario))
    bounds = None if memory else memory_bounds(scenario, by.memory)
    if bounds and bounds[0].peak_bytes == bounds[1].peak_bytes:  # what is not known does not decide
        memory, unknown, bounds = bounds[1], None, None
    found = Prediction(
        scenario=scenario, memory=memory, memory_unknown=why_between(scenario) if bounds else unknown,
        memory_bounds=bounds,
    )  # fmt: skip
    return with_speed(found, by) if timed else found


def with_speed(found: P, by: Predictors) -> P:
    """The prediction with its speed, or why there is none."""
    scenario = found.planned
    speed, unknown = tried(lambda: by.speed(scenario), None if scenario.device else NO_DEVICE)
    return replace(found, speed=speed, speed_unknown=unknown)


def tried(prediction: Callable[[], T], unknown: str | None = None) -> tuple[T | None, str | None]:
    """A prediction, or why there is none; `unknown`: what is known not to be predicted."""
    if unknown is not None:
        return None, unknown
    try:
        return prediction(), None
    except HarnessError as error:
        return None, str(error)


def with_traffic(found: P) -> P:
    """The prediction with what its collectives send, or why that is not known."""
    lines, unknown = tried(lambda: tuple(step_traffic(found.planned)))
    return replace(found, traffic=lines or (), traffic_unknown=unknown)
