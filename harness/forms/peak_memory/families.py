"""The fullest moments of a step by family, DDP's and a pipeline's own, and the rank that holds most.

Of a pipeline (torch 2.13, distributed/pipelining): `stage.py` keeps inputs, outputs and the graph of every
micro-batch from its forward to its backward pass (`fwd_cache`); `schedules.py` has the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from harness.forms.ddp import wraps
from harness.forms.fsdp.fsdp1 import ALIGNMENT_BYTES, flat_unit, is_sharded
from harness.forms.model.activations import ActivationProfile, Gradient, Segment, Size, no_activations
from harness.forms.model.layout import Layout, Tensor, ceil_to, elements
from harness.forms.peak_memory.fsdp import Fsdp1Timeline, Fsdp2Timeline
from harness.forms.peak_memory.step import GRADIENTS, Ledger, PeakMoment, Phase, Replay, StepTimeline
from harness.forms.peak_memory.zero import Zero0Timeline, Zero3TensorTimeline, Zero3Timeline, Zero12Timeline
from harness.forms.pipeline import (
    cut_of,
    held,
    micro_batches_of,
    options_of,
    place_of,
    ranks_of,
    samples_at_once,
)
from harness.forms.tensor import local_workload
from harness.forms.terms import Term, named_terms
from harness.forms.workload import Workload
from harness.forms.zero.zero12 import START_ALIGNMENT_ELEMENTS

PIPELINE = "pipeline"
PIPELINE_TERMS = named_terms("pipeline")
EMPTY = Segment(saved=(), forward=(), backward=(), gradients=(), forward_growth=Size(), held=Size())
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
            self.ledger.add(PIPELINE_TERMS.targets, 16 * tokens)

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
    table = workload.layout.parameters[0]
    replays = [
        _StageReplay(timeline, of_stage(profile, workload.layout, stage, cut.stages),
                   cut.blocks_of(stage), samples, workload.sequence_length,
                   vocabulary=table.shape[0] if stage == cut.stages - 1 else 0)
        for stage in cut.of_rank(place)
    ]  # fmt: skip
    timeline.begin()
    for each, others, first in _unlike_passes(workload, [replay.kept for replay in replays]):
        ledger.add(PIPELINE_TERMS.in_flight, others)
        replays[each.stage].go(backward=each.backward, first=first)
        ledger.drop(PIPELINE_TERMS.in_flight)
    ledger.compute(0)
    with ledger.during("step"):
        timeline.step()
    return ledger.moments()


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
            self._ledger.add(PIPELINE_TERMS.logits, self._logits)
            self.backward()
            self._ledger.drop(PIPELINE_TERMS.logits)
        else:
            self.forward()


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


TIMELINES: dict[str, type[StepTimeline]] = {
    "single": StepTimeline,
    "ddp": DdpTimeline,
    "fsdp1": Fsdp1Timeline,
    "fsdp2": Fsdp2Timeline,
    "replicate": Fsdp2Timeline,
    "zero0": Zero0Timeline,
    "zero12": Zero12Timeline,
    "zero3": Zero3Timeline,
    "zero3-tensor": Zero3TensorTimeline,
}


def has_timeline(workload: Workload) -> bool:
    """Whether the timeline of a step is known."""
    family = local_workload(workload).strategy.family
    return family == PIPELINE or family in TIMELINES


def peak_moments(workload: Workload, profile: ActivationProfile) -> dict[Phase, PeakMoment]:
    """The fullest moment of each phase of an ordinary step of one rank."""
    if workload.strategy.family == PIPELINE:
        return pipeline_moments(workload, profile)
    timeline, samples, length = _timeline(workload)
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


def peak_rank(workload: Workload) -> int:
    """The first rank with the largest model states.

    Nothing sharded: all are equal. FSDP2 and ZeRO-3 pad at the end of what they cut, so that rank 0 has most.
    FSDP1: every piece is as long, and the optimizer keeps no states of padding. ZeRO-1 and ZeRO-2: each
    rank keeps the whole gradient of every parameter that reaches into its partition, and zeros for padding.
    A pipeline: by the stages of each place. Of ranks that cut layers the first holds most of each.
    """
    family = workload.strategy.family
    if family == "pipeline":
        return _peak_place(workload)
    if family == "zero12-tensor":
        assert workload.mesh is not None
        return workload.mesh.group("data", 0)[_largest_straddling(local_workload(workload))]
    if family == "zero12":
        return _largest_straddling(workload)
    if family == "fsdp1" and is_sharded(workload):
        return _least_padding(workload)
    return 0


def _peak_place(workload: Workload) -> int:
    assert workload.mesh is not None
    places = workload.mesh.group("pipeline", 0)
    return max(places, key=lambda rank: (elements(held(replace(workload, rank=rank))), -rank))


def _largest_straddling(workload: Workload) -> int:
    layout, ranks = workload.layout, workload.world_size
    return layout.once(("most straddling", ranks), lambda: _most_straddling(layout, ranks))


def _most_straddling(layout: Layout, ranks: int) -> int:
    """A sweep over the partitions of each group, as `zero12` lays them out."""
    touched = [0] * ranks
    for group in layout.groups():
        piece = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks) // ranks
        for rank, size in enumerate(_touched(group, piece, ranks)):
            touched[rank] += size
    return touched.index(max(touched))


def _touched(group: list[Tensor], piece: int, ranks: int) -> list[int]:
    """Elements of all parameters that reach into each partition, and its padding."""
    ends = list(accumulate(tensor.numel for tensor in group))
    starts = [0, *ends]
    found = []
    for rank in range(ranks):
        begin, end = rank * piece, min((rank + 1) * piece, ends[-1])
        if begin >= end:
            found.append(piece)
            continue
        first = bisect_right(ends, begin)
        last = bisect_right(starts, end - 1) - 1
        found.append(ends[last] - starts[first] + piece - (end - begin))
    return found


def _least_padding(workload: Workload) -> int:
    """Of a shard group; groups are equal."""
    pieces = workload.shards
    padding: dict[int, int] = {}
    for _, tensors in workload.units():
        flat = flat_unit(tensors, workload.compute_dtype, pieces)
        length = flat.length // pieces
        position = 0
        for offset, tensor in zip(flat.offsets, flat.parameters, strict=True):
            _add(padding, position, offset, length)
            position = offset + tensor.numel
        _add(padding, position, flat.length, length)
    clean = next((rank for rank in range(pieces) if rank not in padding), None)
    return min(padding, key=lambda rank: (padding[rank], rank)) if clean is None else clean


def _add(padding: dict[int, int], begin: int, end: int, length: int) -> None:
    """Spread the padding from `begin` to `end` over the pieces in which it lies."""
    while begin < end:
        rank = begin // length
        stop = min(end, (rank + 1) * length)
        padding[rank] = padding.get(rank, 0) + stop - begin
        begin = stop


def most_gathered_bytes(workload: Workload, width: int, blocks_at_once: int) -> int:
    """Root and the `blocks_at_once` largest blocks, at `width` bytes per element.

    The root is gathered as long as the model computes, and its blocks one after the other (torch 2.13,
    `distributed/fsdp/_fully_shard`, `_fsdp_state.py`, and FSDP1's `_runtime_utils.py`). An upper bound: each
    parameter has the larger of FSDP2's padding of its rows and FSDP1's alignment, each unit FSDP1's padding.
    """
    sizes = {name: _unit_bytes(unit, workload.shards, width) for name, unit in workload.layout.units()}
    root = sizes.pop("", 0)
    return root + sum(sorted(sizes.values(), reverse=True)[:blocks_at_once])


def _unit_bytes(parameters: Sequence[Tensor], ranks: int, width: int) -> int:
    return (sum(_padded(parameter, ranks, width) for parameter in parameters) + ranks) * width


def _padded(parameter: Tensor, ranks: int, width: int) -> int:
    """Elements."""
    rows, row = parameter.rows
    return max(ceil_to(rows, ranks) * row, ceil_to(parameter.numel, ALIGNMENT_BYTES // width))
