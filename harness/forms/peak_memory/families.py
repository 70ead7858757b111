"""The timeline of a step by family, and that of DDP."""

from __future__ import annotations

from dataclasses import replace

from harness.forms.ddp import wraps
from harness.forms.model.activations import ActivationProfile, no_activations
from harness.forms.model.layout import Tensor
from harness.forms.part import local_workload
from harness.forms.peak_memory.fsdp1 import Fsdp1Timeline
from harness.forms.peak_memory.fsdp2 import Fsdp2Timeline
from harness.forms.peak_memory.peak_rank import peak_rank
from harness.forms.peak_memory.pipeline import pipeline_moments
from harness.forms.peak_memory.replay import Replay, hooks_modules
from harness.forms.peak_memory.step_timeline import GRADIENTS, Ledger, PeakMoment, Phase, StepTimeline
from harness.forms.peak_memory.zero0 import Zero0Timeline
from harness.forms.peak_memory.zero3 import Zero3TensorTimeline, Zero3Timeline
from harness.forms.peak_memory.zero12 import Zero12Timeline
from harness.forms.terms import Term
from harness.forms.workload import Workload

BUCKETS = Term(
    kind="gradients", name="gradients, as views of DDP's buckets", formula="4 P",
    source="torch 2.13, csrc/distributed/c10d/reducer.cpp: buckets stay allocated between steps",
)  # fmt: skip


class DdpTimeline(StepTimeline):
    """Buckets stay; a gradient is copied into its bucket as it comes, and freed where it is a view."""

    def begin(self) -> None:
        super().begin()
        if self._views:
            size = self.workload.layout.trained_count * self.workload.master_bytes
            self.ledger.add(BUCKETS, size)

    def gradient_ready(self, parameter: Tensor) -> None:
        # Under `no_sync` gradients add up beside the buckets; the last micro-step copies them in.
        if not self._views or not self.reduces:
            super().gradient_ready(parameter)
        elif self.adds_up_whole:
            self.ledger.drop(GRADIENTS, parameter.numel * self.gradient_bytes)

    @property
    def _views(self) -> bool:
        return wraps(self.workload) and self.workload.like_for_like


TIMELINES: dict[str, type[StepTimeline]] = {
    "single": StepTimeline,
    "ddp": DdpTimeline,
    "fsdp1": Fsdp1Timeline,
    "fsdp2": Fsdp2Timeline,
    "zero0": Zero0Timeline,
    "zero12": Zero12Timeline,
    "zero3": Zero3Timeline,
    "zero3-tensor": Zero3TensorTimeline,
}
PIPELINE = "pipeline"


def has_timeline(workload: Workload) -> bool:
    """Whether the timeline of a step is known."""
    family = local_workload(workload).strategy.family
    return family == PIPELINE or family in TIMELINES


def peak_moments(workload: Workload, profile: ActivationProfile) -> dict[Phase, PeakMoment]:
    """The fullest moment of each phase of an ordinary step of one rank."""
    if workload.strategy.family == PIPELINE:
        return pipeline_moments(workload, profile)
    timeline, samples, length = _timeline(workload)
    if not hooks_modules(timeline):
        profile = profile.fullest(samples, length)
    Replay(timeline, profile, micro_batch=samples, sequence=length).run()
    return timeline.ledger.moments()


def _timeline(workload: Workload) -> tuple[StepTimeline, int, int]:
    """Of one rank, before its step begins; with its samples and their tokens."""
    length = workload.part_length
    assert length is not None
    local = local_workload(workload)
    of_family = TIMELINES.get(workload.strategy.family) or TIMELINES.get(local.strategy.family, StepTimeline)
    return of_family(local, Ledger()), local.micro_batch_size, length


def least_peak(workload: Workload, profile: ActivationProfile) -> int:
    """Bytes below which the peak does not lie, known without the step: what is there as it begins, and what
    its forward pass keeps; 0 of a pipeline."""
    if workload.strategy.family == PIPELINE:
        return 0
    timeline, samples, length = _timeline(workload)
    timeline.begin()
    return timeline.ledger.all_held + profile.forward_bytes(len(timeline.units), samples, length)


def without_activations(workload: Workload) -> int | None:
    """Bytes that the strategy itself needs while a rank computes on a GPU, at most; None: no timeline."""
    held = kinds_without_activations(workload)
    return None if held is None else sum(held.values())


def kinds_without_activations(workload: Workload) -> dict[str, int] | None:
    """By kind, what the strategy itself needs at the fullest moment in which a rank computes on a GPU: model
    states, weights gathered at once, gradients before they are divided, and buffers; None: no timeline.

    Activations come on top. What an update needs for itself is left out: by then they are gone.
    """
    if not has_timeline(workload):
        return None
    on_gpu = replace(
        workload,
        device="cuda",
        transport="nccl",
        # Of a script neither need be known. Activations, which are left out, depend on the first, and what
        # arrives at a stage of a pipeline, which no script has.
        sequence_length=workload.sequence_length or 1,
        optimizer_implementation=workload.optimizer_implementation or "default",
    )
    moments = peak_moments(
        replace(on_gpu, rank=peak_rank(on_gpu)), no_activations(local_workload(on_gpu).layout)
    )
    left_out = ("activations", "data", "temporary")  # a pipeline adds logits and micro-batches in flight
    kept = [
        {term: count for term, count in moment.held.items() if term.kind not in left_out}
        for phase, moment in moments.items()
        if phase != "step"
    ]
    kinds: dict[str, int] = {}
    for term, count in max(kept, key=lambda held: sum(held.values())).items():
        kinds[term.kind] = kinds.get(term.kind, 0) + count
    return kinds
