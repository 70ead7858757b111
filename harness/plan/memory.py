"""Predicted memory of one rank: what it holds, and its peak at the three moments that can decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from harness.errors import HarnessError
from harness.forms.model.activations import ActivationProfile
from harness.forms.part import samples_at_once
from harness.forms.peak_memory.families import least_peak, peak_moments
from harness.forms.peak_memory.step_timeline import TRACED, PeakMoment, Phase
from harness.forms.terms import Term, by_kind
from harness.forms.zero.zero3.gathering import own_settings
from harness.plan.coverage import neighbours, require_activations, require_timeline
from harness.plan.model_part import part_of
from harness.plan.profiles import Trace, activation_profile
from harness.plan.scenario import Scenario

NCCL_NEIGHBOUR_BYTES = (2 + 10) * 2**20
"""Of one channel to one neighbour and from it: buffers of all protocols, 4 MiB, 4.7 MiB (LL128) and 0.5 MiB
(LL), on one side, the header on the other, in units of 2 MiB (NCCL 2.30, src/transport/p2p.cc)."""
NCCL_CHANNELS = {"NVLink": 24, "Infinity Fabric": 24}
"""By kind of link within a node (A100: 12 rings, each twice)."""
OTHER_CHANNELS = 4


def nccl_bytes(scenario: Scenario) -> int:
    """Of one communicator: on each channel a ring, and a chain within the node, which its trees are.

    On average over the channels a rank has 2 (n - 1) / n neighbours in a chain of n. Published: 544 MiB on 2
    A100 and 688 on 4 (NVIDIA/nccl issue 964; 576 and 720 by this), about 1 GB on 8 H100, 4.3 GB after an
    all-to-all (issue 1685).
    """
    link = scenario.device.link if scenario.device else "NVLink"
    channels = next((n for kind, n in NCCL_CHANNELS.items() if link.startswith(kind)), OTHER_CHANNELS)
    ranks = scenario.ranks_of_node
    return round(channels * NCCL_NEIGHBOUR_BYTES * (1 + 2 * (ranks - 1) / ranks))


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
    saved: tuple[Term, ...] = ()
    """Activations that a forward pass leaves for the backward pass, by module; no further bytes."""
    host_bytes_per_node: int = 0
    reserved_bytes: int = 0
    """What torch's allocator keeps of the device, at least."""

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
    return MemoryPrediction(
        moments=tuple(
            Moment(
                name=name,
                terms=_terms(max((peaks[p] for p in phases if p in peaks), key=lambda f: f.bytes)),
            )
            for name, phases in PHASES.items()
            if any(phase in peaks for phase in phases)
        ),
        overhead=tuple(device_overhead(scenario)),
        saved=_saved(profile, scenario),
        host_bytes_per_node=host_bytes(scenario),
        reserved_bytes=max(max(moment.bytes, moment.reserved) for moment in peaks.values()),
    )


def least_memory(scenario: Scenario, trace: Trace | None = None) -> int:
    """Bytes of the device below which no prediction lies: much sooner known; 0 where none is made."""
    try:
        least = least_peak(scenario.workload(), _profile(scenario, trace))
    except HarnessError:
        return 0
    return least + sum(term.bytes for term in device_overhead(scenario) if not term.host)


def _profile(scenario: Scenario, trace: Trace | None) -> ActivationProfile:
    """Raises HarnessError where the memory of a scenario has no prediction."""
    require_timeline(scenario)
    require_activations(scenario)
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


def _terms(peak: PeakMoment) -> tuple[Term, ...]:
    return tuple(replace(term, bytes=count) for term, count in peak.held.items())


def _saved(profile: ActivationProfile, scenario: Scenario) -> tuple[Term, ...]:
    workload = scenario.workload()
    blocks = [profile.block_at(n) for n in range(len(part_of(scenario.model, workload).layout.blocks))]
    kinds, counts = {id(block): block for block in blocks}, Counter(map(id, blocks))
    b, s = samples_at_once(workload), workload.part_length or 0
    return tuple(
        Term(
            kind="activations",
            name=f"{where}: {saved.module or 'itself'}",
            bytes=times * saved.size.bytes(b, s),
            formula=f"({saved.size})" + (f" x {times} blocks" if where == "blocks" else ""),
            source=TRACED,
        )
        for where, segment, times in (
            ("embedding", profile.embedding, 1),
            *(("blocks", block, counts[key]) for key, block in kinds.items()),
            ("head", profile.head, 1),
            ("loss", profile.loss, 1),
        )
        for saved in segment.saved
    )


def host_bytes(scenario: Scenario) -> int:
    """Of all ranks of a node: states that lie in host memory."""
    if scenario.torch_device == "cpu":
        return 0
    terms = scenario.states.terms
    per_rank = sum(term.bytes for term in terms if term.host)
    return per_rank * scenario.ranks_of_node
