"""Model states beyond the textbook, or below it."""

from __future__ import annotations

from harness.forms.ddp import BUCKETS_BESIDE_GRADIENTS
from harness.forms.terms import Term
from harness.forms.zero.zero0 import FP32_SURPLUS, SECOND_FP32_COPY
from harness.forms.zero.zero3 import PERSISTENT_PARAMETERS, REDUCTION_BUCKET
from harness.judge.library_notes.note import MEMORY, SMALL_SHARE, CellNote, LibraryNote
from harness.judge.library_notes.training import low_precision_masters
from harness.judge.quantities import RankStates, largest, rank_states, textbook
from harness.judge.rows import CellRuns
from harness.record.workload import known_strategy

CLOSE = 1e-3
"""Relative: measured bytes that are as expected."""
LIMITED_EFFECT = 0.1
"""Of a bucket that the preset limits to 25 MiB: large beside a small model, nothing beside a large one."""
CLEARLY_LESS = 0.97
"""Of the textbook's bytes."""


FP32_GRADIENTS = LibraryNote(
    id="gradients-add-up-in-fp32",
    what="{figure} x the textbook's states: gradients take 4 bytes, the textbook counts 2",
    advice='data_types: {"grad_accum_dtype": "bf16"} halves them and adds micro-steps up in bf16.',
    questions=MEMORY,
    cause="preset",
    since="like-for-like sets grad_accum_dtype to fp32, as DDP and FSDP add up; DeepSpeed's default is the "
    "model's dtype (runtime/engine.py, get_data_types)",
)
BUCKET = LibraryNote.of(
    "persistent-reduction-bucket",
    figure_is_ratio=False,
    what="a buffer for gradients, the reduction bucket, stays allocated: {figure} x the textbook's states",
)
GRADIENTS_TWICE = LibraryNote.of(
    "gradients-twice",
    figure_is_ratio=False,
    what="DDP's buckets hold a second copy of the gradients: {figure} x the textbook's states",
)
WHOLE_PARAMETERS = LibraryNote(
    id="stays-gathered",
    figure_is_ratio=False,
    what=f"{PERSISTENT_PARAMETERS} stay gathered, beside the states: {{figure}} x the textbook's states",
    advice="stage3_param_persistence_threshold: 0 shards them.",
    questions=MEMORY,
)
BY_NAME = {
    FP32_SURPLUS: FP32_GRADIENTS,
    REDUCTION_BUCKET: BUCKET,
    BUCKETS_BESIDE_GRADIENTS: GRADIENTS_TWICE,
    PERSISTENT_PARAMETERS: WHOLE_PARAMETERS,
}
"""By the name of the closed form's term; other extra terms are shown by their name."""
BY_THEMSELVES = (REDUCTION_BUCKET, BUCKETS_BESIDE_GRADIENTS, PERSISTENT_PARAMETERS)
"""Buffers and gathered weights, which are no model states: their figure is their own size."""


def find_in_states(group: CellRuns) -> list[CellNote]:
    """Every one of a cell whose model states were measured; [] where closed form or textbook has none."""
    states, book = largest(rank_states(group.record)), textbook(group.record)
    if states is None or states.expected is None or not book:
        return []
    return [*_extra(group, states, sum(book.values())), *_less(group, states, book)]


def _extra(group: CellRuns, states: RankStates, total: float) -> list[CellNote]:
    assert states.expected is not None
    strategy, found = known_strategy(group.record), []
    for term in states.expected.terms:
        if not term.extra or term.bytes < SMALL_SHARE * total or not _as_expected(states, term.kind):
            continue
        is_zero = strategy is not None and strategy.zero_stage is not None
        surplus = term.bytes / total
        figure = surplus if term.name in BY_THEMSELVES else 1 + surplus
        limited = term.name == REDUCTION_BUCKET and group.record.world.preset == "like-for-like"
        effect = min(surplus, LIMITED_EFFECT) if limited else surplus
        found.append(CellNote(library_note=_note(term, is_zero=is_zero), figure=figure, effect=effect))
    return found


def _note(term: Term, *, is_zero: bool) -> LibraryNote:
    if term.name.startswith(SECOND_FP32_COPY):
        return LibraryNote.of("second-fp32-copy")
    cause = f"whole {term.name}" if term.kind == "gathered" else f"{term.kind}, {term.name}"
    return BY_NAME.get(term.name) or LibraryNote(
        id="other-states",
        what=f"{{figure}} x the textbook's states: {cause}",
        advice="No action: the implementation does so.",
        questions=MEMORY,
        packages=("deepspeed",) if is_zero else ("torch",),
    )


def _less(group: CellRuns, states: RankStates, book: dict[str, float]) -> list[CellNote]:
    strategy = known_strategy(group.record)
    if strategy is None or group.world_size == 1:
        return []
    total = sum(book.values())
    gradients = states.measured.get("gradients", 0)
    if (
        strategy.zero_stage == 1
        and gradients < CLEARLY_LESS * book["gradients"]
        and _as_expected(states, "gradients")
    ):
        saved = (book["gradients"] - gradients) / total
        cut = LibraryNote.of("gradients-cut-at-stage-1")
        return [CellNote(library_note=cut, figure=gradients / book["gradients"], effect=saved)]
    share = states.measured_bytes / total
    other_dtype = low_precision_masters(group.record)
    if strategy.zero_stage is None and strategy.stage == 2 and share < CLEARLY_LESS and not other_dtype:
        return [CellNote(library_note=LibraryNote.of("weights-cut-between-steps"), figure=share)]
    return []


def _as_expected(states: RankStates, kind: str) -> bool:
    assert states.expected is not None
    form = states.expected.kinds().get(kind, 0)
    return abs(states.measured.get(kind, 0) - form) <= CLOSE * form
