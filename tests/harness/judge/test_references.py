"""A run is held to the reference with its split where the loss hangs on the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.quantities import expected_states, volume_differences, why_unknown
from harness.judge.rows import JudgedRun
from harness.record import LayoutPart, ObservedPart, Record, SplitPart, TensorPart
from tests.records import LOSSES, make_record, make_steps, make_weights

DEPENDS = SplitPart(difference=0.3, repetition=0.0, rounding=1e-5)
RANDOM = SplitPart(difference=0.3, repetition=0.2, rounding=1e-5)
COUNTS = SplitPart(difference=0.3, repetition=0.2, rounding=1e-5, by_samples=1e-9)
ADDS_UP = SplitPart(difference=2e-7, repetition=0.0, rounding=1e-5)
CUT, EXACT = "single:micro_batch_size=4", "single:micro_batch_size=4,precision=fp64"
HALF = 0.5
"""What the split changes of each loss."""


def of_reference(label: str, losses: Sequence[float], samples: int, **changes: Any) -> Record:
    record = make_record(label=label, steps=make_steps(losses), run_id=f"run-{label}", **changes)
    world = record.world.model_copy(update={"micro_batch_size": samples, "accumulation_steps": 8 // samples})
    return record.model_copy(update={"world": world})


def row_of(split: SplitPart, losses: Sequence[float], cuts: Sequence[str] = (CUT, EXACT)) -> JudgedRun:
    halves = [loss - HALF for loss in LOSSES]
    records = [of_reference("single", LOSSES, 8, split=split)]
    records += [of_reference(label, halves, 4) for label in cuts]
    run = make_record(label="ddp", steps=make_steps(losses), final_weights=make_weights("c" * 64))
    return Comparison([*records, run]).rows[-1]


def test_a_run_is_held_to_the_reference_with_its_split() -> None:
    row = row_of(DEPENDS, [loss - HALF for loss in LOSSES])
    assert row.reference is not None
    assert row.reference.record.backend.label == CUT
    assert row.judgement.parity == "tight"
    assert row_of(DEPENDS, [loss - HALF + 1e-3 for loss in LOSSES]).judgement.parity == "diverged"


def test_what_another_split_changes_is_no_noise() -> None:
    row = row_of(DEPENDS, [loss - HALF for loss in LOSSES])
    assert row.noise is not None
    assert row.noise.tight.loss < 1e-4
    (level,) = row.noise.levels
    assert level.repetitions == (EXACT,)


def test_a_loss_over_all_ranks_is_held_to_that_of_the_whole_batch() -> None:
    row = row_of(DEPENDS, LOSSES)
    assert row.reference is not None
    assert row.reference.record.backend.label == "single"
    assert row.judgement.parity == "tight"


def test_without_such_a_reference_it_is_unjudged_and_both_losses_are_said() -> None:
    row = row_of(DEPENDS, [loss - HALF for loss in LOSSES], cuts=())
    assert row.judgement.parity == "unjudged"
    assert row.judgement.reason == (
        "the loss depends on how the batch is split: 4.25 in step 3 with 4 samples at once, 4.75 in step 3 "
        "with 8 samples at once in the reference; no record of single:micro_batch_size=4, which 'compare' "
        "runs for this"
    )


def test_random_parts_are_unjudged_whatever_ran() -> None:
    row = row_of(RANDOM, [loss - HALF for loss in LOSSES])
    assert row.judgement.parity == "unjudged"
    assert "draws random numbers" in str(row.judgement.reason)
    near = row_of(RANDOM, [loss - 1e-6 for loss in LOSSES])
    assert near.judgement.parity == "tight", "a state that each pass changes may matter to no loss"


def test_where_the_count_of_passes_decides_runs_with_as_many_are_judged() -> None:
    """The whole batch in one pass is such a run's reference, and its repetitions of one pass are noise."""
    repeated = "single:micro_batch_size=8,norm=fp32,backward=reordered"

    def row(losses: Sequence[float], passes: int = 1) -> JudgedRun:
        halves = [loss - HALF for loss in LOSSES]
        records = [of_reference("single", LOSSES, 8, split=COUNTS), of_reference(CUT, halves, 4)]
        records.append(of_reference(repeated, [loss + 1e-6 for loss in LOSSES], 8))
        run = make_record(label="ddp", steps=make_steps(losses), final_weights=make_weights("c" * 64))
        world = run.world.model_copy(update={"accumulation_steps": passes})
        return Comparison([*records, run.model_copy(update={"world": world})]).rows[-1]

    sound, faulty = row([loss - 1e-6 for loss in LOSSES]), row([loss - 1e-3 for loss in LOSSES])
    assert sound.judgement.parity == "tight"
    assert faulty.judgement.parity == "diverged"
    assert faulty.noise is not None
    assert faulty.noise.levels[0].repetitions == (repeated,)
    other = row([loss - 1e-3 for loss in LOSSES], passes=2).judgement
    assert other.parity == "unjudged"
    assert "a state that each pass changes" in str(other.reason)


def test_losses_that_would_read_alike_are_told_in_full() -> None:
    row = row_of(RANDOM, [*(loss - HALF for loss in LOSSES[:-1]), LOSSES[-1] - 3e-5])
    assert row.judgement.parity == "unjudged"
    assert "4.74997 in step 3 with 4 samples at once, 4.75 in step 3" in str(row.judgement.reason)


def test_a_sum_over_samples_is_held_to_the_whole_batch_and_its_splits_are_noise() -> None:
    row = row_of(ADDS_UP, [loss + 1e-4 for loss in LOSSES], cuts=())
    assert row.judgement.parity == "diverged"
    assert row.reference is not None
    assert row.reference.record.backend.label == "single"


def test_limits_of_each_split_are_told_apart() -> None:
    halves = [loss - HALF for loss in LOSSES]
    records = [of_reference("single", LOSSES, 8, split=DEPENDS), of_reference(CUT, halves, 4)]
    comparison = Comparison([*records, make_record(label="ddp", steps=make_steps(halves))])
    job = records[0].job_id
    assert list(comparison.noises) == [job, f"{job}, 4 at once"]


LAYOUT = LayoutPart(
    parameters=[TensorPart(name=name, shape=[2], dtype="float32") for name in "ab"], decaying=[], buffers=[],
    blocks=[], uses=None, without_gradient=[], unreached=None, unit_calls=None, depends_on_data=True,
)  # fmt: skip


def test_where_values_decide_what_runs_bytes_are_not_judged() -> None:
    record = make_record(label="fsdp", layout=LAYOUT)
    record = record.model_copy(update={"steps": [replace(step, window="probed") for step in record.steps]})
    assert why_unknown(record) == "execution depends on data"
    assert volume_differences(record) == []
    assert expected_states(record, 0) is None


def test_a_record_with_counts_of_the_reference_still_loads() -> None:
    assert ObservedPart.model_validate({"counted": {"uses": None}}) == ObservedPart()
