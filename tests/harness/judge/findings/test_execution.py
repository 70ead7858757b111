"""Passes and modes against the reference's, and what ranks should have alike."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import ObservedPart, Record
from tests.records import make_ranks, make_record

Passes = dict[int, tuple[int, int] | None]


def run(label: str, accumulation_steps: int = 1, *passes: Passes, **changes: Any) -> Record:
    """Of as many ranks as `passes`."""
    ranks = make_ranks(len(passes))
    record = make_record(
        label=label,
        ranks=[
            part.model_copy(update={"passes": of_rank}) for part, of_rank in zip(ranks, passes, strict=True)
        ],
        **changes,
    )
    world = record.world.model_copy(update={"accumulation_steps": accumulation_steps})
    return record.model_copy(update={"world": world})


def found(kind: str, *records: Record) -> list[str]:
    return [finding.message for finding in Comparison(records).findings if finding.id == kind]


def test_a_rank_that_skips_a_micro_batch_is_named_with_the_step() -> None:
    reference = run("single", 2, {0: (2, 2)})
    skips = run("ddp", 2, {0: (2, 2)}, {0: (2, 2), 3: (1, 1)})
    assert found("passes-differ", reference, skips) == [
        "ddp on 2 ranks: forward passes in step 3: 1, due: 2 (ranks: 1; micro-steps: 2, each with 1 in the "
        "reference)"
    ]


def test_a_model_that_is_run_once_more_is_named() -> None:
    reference = run("single", 1, {0: (1, 1)})
    (message,) = found("passes-differ", reference, run("ddp", 1, {0: (2, 1)}, {0: (2, 1)}))
    assert "forward passes in step 0: 2, due: 1 (ranks: 0, 1;" in message
    (message,) = found("passes-differ", reference, run("ddp", 1, {0: (1, 2)}, {0: (1, 2)}))
    assert "backward passes in step 0: 2, due: 1 (ranks: 0, 1;" in message


def test_how_often_a_micro_step_calls_the_model_is_the_references_count() -> None:
    four = run("single", 4, {0: (16, 4)})
    assert found("passes-differ", four, run("ddp", 2, {0: (8, 2)}, {0: (8, 2)})) == []
    assert len(found("passes-differ", four, run("ddp", 2, {0: (2, 2)}, {0: (2, 2)}))) == 1


def test_what_the_reference_does_not_count_is_not_judged() -> None:
    other = run("ddp", 1, {0: (5, 3)}, {0: (5, 3)})
    for reference in ({}, {0: None}, {0: (1, 1), 2: (2, 1)}, {0: (1, 1), 1: None}):
        assert found("passes-differ", run("single", 1, reference), other) == []
    assert found("passes-differ", run("single", 2, {0: (3, 2)}), other) == []
    assert found("passes-differ", run("single", 1, {0: (1, 1)}), run("ddp", 1, {}, {0: None})) == []


def moded(label: str, **seen: Any) -> Record:
    return make_record(label=label, observed=ObservedPart(**seen))


def test_layers_that_evaluate_in_training_mode_are_named() -> None:
    reference = moded("single", evaluating_in_training=["encoder"], training_in_evaluation=[])
    given = moded("ddp", evaluating_in_training=["encoder"], training_in_evaluation=["drop", "norm"])
    assert found("mode-differs", reference, given) == [
        "ddp on 2 ranks: in training mode in evaluation passes: drop, norm"
    ]


def test_layers_that_only_the_reference_keeps_in_evaluation_mode_are_named() -> None:
    reference = moded("single", evaluating_in_training=["encoder"])
    assert found("mode-differs", reference, moded("ddp", evaluating_in_training=[])) == [
        "ddp on 2 ranks: in evaluation mode in training passes, in the reference alone: encoder"
    ]
    assert found("mode-differs", reference, moded("ddp", evaluating_in_training=["encoder"])) == []
    assert found("mode-differs", reference, moded("ddp")) == []


def test_ranks_with_the_same_difference_are_named_together() -> None:
    unlike = {"gradient clipping": [None, 1.0], "tf32": [True, False]}
    ranks = [part.model_copy(update={"otherwise": unlike if part.rank else {}}) for part in make_ranks(3)]
    assert found("ranks-differ", make_record(), make_record(label="ddp", world_size=3, ranks=ranks)) == [
        "ddp on 3 ranks: differs from rank 0 (ranks: 1, 2): gradient clipping none against 1; "
        "tf32 on against off"
    ]
    assert found("ranks-differ", make_record(), make_record(label="ddp")) == []


def test_buffers_that_only_the_reference_moves_are_named() -> None:
    def of(label: str, *still: str, known: bool = True) -> Record:
        seen = ObservedPart(
            buffers={"mean": "1", "var": "2", "rope": "3"}, still_buffers=sorted(still) if known else None
        )
        return run(label, 1, *[{}] * (1 if label == "single" else 2), observed=seen)

    reference = of("single", "rope")
    assert found("buffers-not-updated", reference, of("ddp", "mean", "rope")) == [
        "ddp on 2 ranks: buffers kept the values of before the training, which changes them in the "
        "reference: mean"
    ]
    (several,) = found("buffers-not-updated", reference, of("ddp", "mean", "var"))
    assert "in the reference: mean, var" in several
    assert found("buffers-not-updated", reference, of("ddp", "rope")) == []
    assert found("buffers-not-updated", reference, of("ddp")) == [], "moved here alone, as by a warm-up"
    assert found("buffers-not-updated", reference, of("ddp", known=False)) == []
    assert found("buffers-not-updated", of("single", known=False), of("ddp", "mean")) == []
