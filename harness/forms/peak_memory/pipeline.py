"""The fullest moments of a rank of a pipeline: one micro-batch in a pass, others waiting for theirs.

torch 2.13, distributed/pipelining: `stage.py` keeps inputs, outputs and the graph of every micro-batch from
its forward to its backward pass (`fwd_cache`); `schedules.py` has the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.forms.model.activations import ActivationProfile, Gradient, Segment, Size
from harness.forms.model.layout import Layout
from harness.forms.part import samples_at_once
from harness.forms.peak_memory.replay import Replay
from harness.forms.peak_memory.step_timeline import Ledger, PeakMoment, Phase, StepTimeline
from harness.forms.pipeline import cut_of, micro_batches_of, options_of, place_of, ranks_of
from harness.forms.terms import named_terms
from harness.forms.workload import Workload

EMPTY = Segment(saved=(), forward=(), backward=(), gradients=(), forward_growth=Size(), held=Size())
IN_FLIGHT, LOGITS, TARGETS = named_terms("pipeline", "in_flight logits targets")


@dataclass(frozen=True)
class Pass:
    """A rank's pass of one micro-batch through one of its stages."""

    backward: bool
    stage: int
    """Among the stages of the rank, from 0."""


def order(workload: Workload) -> Iterator[Pass]:
    """The passes of one rank in one micro-step, in order.

    GPipe: all forward passes, then all backward passes. 1F1B: the ranks behind this one, and itself, each
    hold one micro-batch before backward and forward passes alternate (`Schedule1F1B`). Interleaved:
    micro-batches in rounds of as many as there are ranks, stage after stage (`_get_warmup_ops`).
    """
    ranks, micro = ranks_of(workload), micro_batches_of(workload)
    stages = cut_of(workload).stages // ranks
    behind = ranks - 1 - place_of(workload)
    per_round = micro // max(1, micro // ranks)
    schedule = options_of(workload).schedule
    if schedule == "gpipe":
        ahead = micro
    elif schedule == "1f1b":
        ahead = min(micro, behind + 1)
    else:
        ahead = min(micro * stages, (stages - 1) * per_round + 2 * behind + 1)
    for step in range(micro * stages + ahead):
        if step < micro * stages:
            yield Pass(False, step // per_round % stages)
        if (done := step - ahead + 1) >= 0 and done < micro * stages:
            yield Pass(True, stages - 1 - done // per_round % stages)


class PipelineTimeline(StepTimeline):
    """The blocks of one stage at a time; gradients add up over micro-batches."""

    def begin(self) -> None:
        super().begin()
        self._blocks = {unit.name: unit for unit in self.units}
        if place_of(self.workload) == ranks_of(self.workload) - 1:
            tokens = self.workload.micro_batch_size * (self.workload.sequence_length or 0)
            self.ledger.add(TARGETS, 16 * tokens)

    def visit(self, blocks: tuple[str, ...], *, first: bool) -> None:
        """A stage's pass begins. first: none of its gradients is there yet."""
        self.units = tuple(self._blocks[name] for name in blocks)
        self.micro_step = 0 if first else 1


def pipeline_moments(workload: Workload, profile: ActivationProfile) -> dict[Phase, PeakMoment]:
    """The fullest moment of each phase, over the passes of a rank that differ."""
    assert workload.sequence_length is not None
    ledger = Ledger()
    timeline = PipelineTimeline(workload, ledger)
    cut, place = cut_of(workload), place_of(workload)
    samples = samples_at_once(workload)
    profile = profile.fullest(samples, workload.sequence_length)
    table = workload.layout.parameters[0]
    replays = [
        _StageReplay(timeline, of_stage(profile, workload.layout, stage, cut.stages),
                   cut.blocks_of(stage), samples, workload.sequence_length,
                   vocabulary=table.shape[0] if stage == cut.stages - 1 else 0)
        for stage in cut.of_rank(place)
    ]  # fmt: skip
    timeline.begin()
    for each, others, first in _unlike_passes(workload, [replay.kept for replay in replays]):
        ledger.add(IN_FLIGHT, others)
        replays[each.stage].go(backward=each.backward, first=first)
        ledger.drop(IN_FLIGHT)
    ledger.compute(0)
    with ledger.during("step"):
        timeline.step()
    return ledger.peaks


def _unlike_passes(workload: Workload, kept: Sequence[int]) -> Iterator[tuple[Pass, int, bool]]:
    """Of passes that find the same gradients, the first with most micro-batches in flight.

    Each with the bytes of those and whether its stage has no gradients yet. `kept`: bytes that a micro-batch
    in flight keeps on each stage of the rank.
    """
    in_flight, reached = [0] * len(kept), [False] * len(kept)
    found: list[tuple[Pass, int, tuple[bool, ...]]] = []
    for _ in range(min(2, workload.accumulation_steps)):
        for each in order(workload):
            in_flight[each.stage] -= each.backward
            others = sum(count * size for count, size in zip(in_flight, kept, strict=True))
            found.append((each, others, tuple(reached)))
            in_flight[each.stage] += not each.backward
            reached[each.stage] |= each.backward
    most: dict[tuple[Pass, tuple[bool, ...]], int] = {}
    for each, others, there in found:
        most[each, there] = max(others, most.get((each, there), 0))
    for each, others, there in found:
        if most.get((each, there)) == others:
            del most[each, there]
            yield each, others, not there[each.stage]


class _StageReplay(Replay):
    """One micro-batch through one stage."""

    def __init__(
        self, timeline: PipelineTimeline, profile: ActivationProfile, blocks: tuple[str, ...], samples: int,
        sequence: int, *, vocabulary: int,
    ) -> None:  # fmt: skip
        super().__init__(timeline, profile, micro_batch=samples, sequence=sequence)
        self._stage, self._blocks = timeline, blocks
        self._logits = samples * sequence * vocabulary * timeline.workload.compute_bytes
        self.kept = profile.saved_bytes(len(blocks), samples, sequence) + self._logits
        """Bytes from the forward to the backward pass of a micro-batch."""

    def go(self, *, backward: bool, first: bool) -> None:
        self._stage.visit(self._blocks, first=first)
        if backward:
            self._ledger.add(LOGITS, self._logits)
            self._backward()
            self._ledger.drop(LOGITS)
        else:
            self._forward()


def of_stage(profile: ActivationProfile, layout: Layout, stage: int, stages: int) -> ActivationProfile:
    """The profile of one stage: blocks, the embedding on the first, head and loss on the last.

    A tied weight has a gradient on either end; in one process that of the head waits for the embedding's.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    embedding, head = profile.embedding, profile.head
    if layout.tied:
        embedding = replace(embedding, held=_without_constant(embedding.held))
        firsts = [Gradient(parameter=name, live=Size()) for name in dict.fromkeys(layout.tied.values())]
        head = replace(head, gradients=(*head.gradients, *firsts))
    return replace(
        profile,
        embedding=embedding if is_first else EMPTY,
        head=head if is_last else EMPTY,
        loss=profile.loss if is_last else EMPTY,
    )


def _without_constant(size: Size) -> Size:
    return Size((0, *size.coefficients[1:]))
