"""What cells hold beyond the textbook, or less.

Only of kinds whose measured bytes are as the closed form of the implementation expects: its terms then name
the cause.
"""

from __future__ import annotations

from harness.compare.repeats import Repeats
from harness.compare.states import RankStates, largest, rank_states, textbook
from harness.compare.surprises.surprise import MEMORY, SMALL_SHARE, Behaviour, Sighting
from harness.compare.surprises.training import low_precision_masters
from harness.forms.ddp import BUCKETS_BESIDE_GRADIENTS
from harness.forms.terms import Term
from harness.forms.zero import FP32_SURPLUS, SECOND_FP32_COPY
from harness.forms.zero3.states import REDUCTION_BUCKET
from harness.record.workload import known_strategy

CLOSE = 1e-3
"""Relative: measured bytes that are as expected."""
LIMITED_EFFECT = 0.1
"""Of a bucket that the preset limits to 25 MiB: large beside a small model, nothing beside a large one."""
CLEARLY_LESS = 0.97
"""Of the textbook's bytes."""

SECOND_COPY = Behaviour(
    id="second-fp32-copy",
    what="{figure} x the textbook's states: an fp32 copy of weights that are fp32 already",
    advice="No action: mixed precision has it anyway.",
    questions=MEMORY,
    since="DeepSpeed 0.14.5 to 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py clone the partition in "
    "fp32 whatever its dtype",
)
FP32_GRADIENTS = Behaviour(
    id="gradients-add-up-in-fp32",
    what="{figure} x the textbook's states: gradients take 4 bytes, the textbook counts 2",
    advice='data_types: {"grad_accum_dtype": "bf16"} halves them and adds micro-steps up in bf16.',
    questions=MEMORY,
    cause="preset",
    since="like-for-like sets grad_accum_dtype to fp32, as DDP and FSDP add up; DeepSpeed's default is the "
    "model's dtype (runtime/engine.py, get_data_types)",
)
BUCKET = Behaviour(
    id="persistent-reduction-bucket",
    figure_is_ratio=False,
    what="a reduction bucket of {figure} x the textbook's states stays allocated",
    advice="Set reduce_bucket_size: 5e8 elements by default, whatever the model.",
    questions=MEMORY,
    since="DeepSpeed 0.19.8, runtime/zero/stage3.py, ipg_buckets",
)
GRADIENTS_TWICE = Behaviour(
    id="gradients-twice",
    figure_is_ratio=False,
    what="a second copy of the gradients, {figure} x the textbook's states, in DDP's buckets",
    advice="Set gradient_as_bucket_view=True.",
    questions=MEMORY,
    packages=("torch",),
    since="torch 2.13, csrc/distributed/c10d/reducer.cpp",
)
GRADIENTS_CUT = Behaviour(
    id="gradients-cut-at-stage-1",
    what="{figure} x the textbook's gradients: stage 1 keeps only its part of them after the last micro-step",
    advice="Nothing; compare peaks, which include complete gradients.",
    questions=MEMORY,
    since="DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, copy_grads_in_partition",
)
WEIGHTS_CUT = Behaviour(
    id="weights-cut-between-steps",
    what="{figure} x the textbook's states: weights are sharded again after the backward pass",
    advice="Nothing; the peak includes the gathered weights.",
    questions=MEMORY,
    packages=("torch",),
    since="torch 2.13, distributed/fsdp: SHARD_GRAD_OP and reshard_after_forward=False",
)
BY_NAME = {
    FP32_SURPLUS: FP32_GRADIENTS,
    REDUCTION_BUCKET: BUCKET,
    BUCKETS_BESIDE_GRADIENTS: GRADIENTS_TWICE,
}
"""By the name of the closed form's term; other extra terms are shown by their name."""
BY_THEMSELVES = (REDUCTION_BUCKET, BUCKETS_BESIDE_GRADIENTS)
"""Buffers, which are no model states: their figure is their own size."""


def find(group: Repeats) -> list[Sighting]:
    """Every one of a cell whose model states were measured; [] where closed form or textbook has none."""
    states, book = largest(rank_states(group.record)), textbook(group.record)
    if states is None or states.expected is None or not book:
        return []
    return [*_extra(group, states, sum(book.values())), *_less(group, states, book)]


def _extra(group: Repeats, states: RankStates, total: float) -> list[Sighting]:
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
        found.append(Sighting(behaviour=_behaviour(term, is_zero=is_zero), figure=figure, effect=effect))
    return found


def _behaviour(term: Term, *, is_zero: bool) -> Behaviour:
    if term.name.startswith(SECOND_FP32_COPY):
        return SECOND_COPY
    return BY_NAME.get(term.name) or Behaviour(
        id="other-states",
        what=f"{{figure}} x the textbook's states: {term.kind}, {term.name}",
        advice="No action: the implementation does so.",
        questions=MEMORY,
        packages=("deepspeed",) if is_zero else ("torch",),
    )


def _less(group: Repeats, states: RankStates, book: dict[str, float]) -> list[Sighting]:
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
        return [Sighting(behaviour=GRADIENTS_CUT, figure=gradients / book["gradients"], effect=saved)]
    share = states.measured_bytes / total
    other_dtype = low_precision_masters(group.record)
    if strategy.zero_stage is None and strategy.stage == 2 and share < CLEARLY_LESS and not other_dtype:
        return [Sighting(behaviour=WEIGHTS_CUT, figure=share)]
    return []


def _as_expected(states: RankStates, kind: str) -> bool:
    assert states.expected is not None
    form = states.expected.kinds().get(kind, 0)
    return abs(states.measured.get(kind, 0) - form) <= CLOSE * form
