"""Passes and modes against the reference's, and what ranks should have alike."""

from typing import Any

import pytest

from harness.judge.findings.finding import Finding, statements
from harness.record import ObservedPart, Record
from tests.records import make_ranks, make_record, told

Passes = dict[int, tuple[int, int] | None]


def run(label: str, accumulation_steps: int = 1, *passes: Passes, **changes: Any) -> Record:
    """Of as many ranks as `passes`."""
    ranks, world = make_ranks(len(passes), passes=list(passes)), {"accumulation_steps": accumulation_steps}
    return make_record(label=label, ranks=ranks, world=world, **changes)


def found(kind: str, *records: Record) -> list[str]:
    return [finding.message for finding in told(records, kind)]


ONE, TWO, FOUR = run("single", 1, {0: (1, 1)}), run("single", 2, {0: (2, 2)}), run("single", 4, {0: (16, 4)})


@pytest.mark.parametrize(
    ("reference", "other", "message"),
    [
        (
            TWO, run("ddp", 2, {0: (2, 2)}, {0: (2, 2), 3: (1, 1)}),
            "forward passes in step 3: 1, due: 2 (ranks: 1; micro-steps: 2, each with 1 in the reference)",
        ),
        (ONE, run("ddp", 1, *[{0: (2, 1)}] * 2), "forward passes in step 0: 2, due: 1 (ranks: 0, 1;"),
        # How often a micro-step calls the model is the reference's count.
        (FOUR, run("ddp", 2, *[{0: (2, 2)}] * 2), "forward passes in step 0: 2, due: 8 (ranks: 0, 1;"),
        (FOUR, run("ddp", 2, *[{0: (8, 2)}] * 2), ""),
        # What one of them does not count is not judged.
        *(
            (run("single", 1, counted), run("ddp", 1, *[{0: (5, 3)}] * 2), "")
            for counted in ({}, {0: None}, {0: (1, 1), 2: (2, 1)}, {0: (1, 1), 1: None})
        ),
        (run("single", 2, {0: (3, 2)}), run("ddp", 1, *[{0: (5, 3)}] * 2), ""),
        (ONE, run("ddp", 1, {}, {0: None}), ""),
    ],
)  # fmt: skip
def test_passes_that_are_not_the_references_are_named(reference: Record, other: Record, message: str) -> None:
    named = found("passes-differ", reference, other)
    assert len(named) == bool(message)
    assert all(f"ddp on 2 ranks: {message}" in one for one in named)


def moded(label: str, **seen: Any) -> Record:
    return make_record(label=label, observed=ObservedPart(**seen))


def test_layers_in_the_other_mode_than_the_references_are_named() -> None:
    reference = moded("single", evaluating_in_training=["encoder"])
    assert found("mode-differs", reference, moded("ddp", evaluating_in_training=[])) == [
        "ddp on 2 ranks: in evaluation mode in training passes, in the reference alone: encoder"
    ]
    assert found("mode-differs", reference, moded("ddp", evaluating_in_training=["encoder"])) == []
    assert found("mode-differs", reference, moded("ddp")) == []


def test_ranks_with_the_same_difference_are_named_together() -> None:
    unlike = {"gradient clipping": [None, 1.0], "tf32": [True, False]}
    ranks = make_ranks(3, otherwise=[{}, unlike, unlike])
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
        "ddp on 2 ranks: buffers never changed, though training changes them in the reference: mean"
    ]
    (several,) = found("buffers-not-updated", reference, of("ddp", "mean", "var"))
    assert "in the reference: mean, var" in several
    assert found("buffers-not-updated", reference, of("ddp", "rope")) == []
    assert found("buffers-not-updated", reference, of("ddp")) == [], "moved here alone, as by a warm-up"
    assert found("buffers-not-updated", reference, of("ddp", known=False)) == []
    assert found("buffers-not-updated", of("single", known=False), of("ddp", "mean")) == []


def gaps(*records: Record) -> list[Finding]:
    return told([make_record(), *records], "runs-missing")


def repeated(repeat: int, label: str = "ddp", command: str = "harness compare", **changes: object) -> Record:
    name = f"{label}-{repeat}"
    return make_record(label=label, repeat=repeat, run_id=name, command=command.split(), **changes)


def test_a_gap_is_named() -> None:
    (finding,) = gaps(repeated(0), repeated(2), repeated(4))
    assert finding.values == {"missing": [1, 3], "runs": 5}
    assert finding.message == ("ddp on 2 ranks: missing from the records: 2 of 5 runs, counted from 0: 1, 3")


@pytest.mark.parametrize("option", ["--repeats 3", "--repeats=3"])
def test_the_command_says_how_many_there_should_be(option: str) -> None:
    asked = f"harness compare {option}"
    others = [repeated(number, label="fsdp", command=asked) for number in range(3)]
    (finding,) = gaps(repeated(0, command=asked), repeated(1), *others)
    assert (finding.backends, finding.values) == (("ddp",), {"missing": [2], "runs": 3})
    assert "missing from the records: 1 of 3 runs, counted from 0: 2" in finding.message


def test_cells_that_lack_the_same_runs_are_told_together() -> None:
    found = gaps(repeated(1), repeated(1, label="zero1"))
    (one,) = statements(found)
    assert one.sentence.startswith(
        "ddp and zero1 on 2 ranks: missing from the records: 1 of 2 runs, counted from 0: 0"
    )


@pytest.mark.parametrize(
    "records",
    [
        [repeated(0), repeated(1)],
        [repeated(0, command="harness compare --repeats 1")],
        [repeated(0, command="harness compare --repeats all")],
        [repeated(0, command="")],
        # Runs of a cell that were made on two machines stand apart in the tables.
        [repeated(0), repeated(1, environment={"cpu": "another"})],
        [repeated(0, command="harness compare --repeats 3", status="unsupported", reasons=["no"], steps=[])],
        # A comparison of one run each, beside records of an earlier one of two.
        [
            *(repeated(0, label=label, command="harness compare --repeats 2") for label in ("ddp", "fsdp")),
            repeated(0, label="zero1"),
        ],
    ],
)
def test_without_a_gap_nothing_is_said(records: list[Record]) -> None:
    assert gaps(*records) == []


def test_runs_that_failed_are_told_as_left_out_where_others_have_a_result() -> None:
    (finding,) = gaps(
        repeated(0, status="failed", steps=[]), repeated(1), repeated(2, status="oom", steps=[]), repeated(3)
    )
    assert finding.values == {"without_result": [0, 2], "runs": 4}
    assert finding.message == (
        "ddp on 2 ranks: left out of figures and speeds, without a result (failed, oom): 2 of 4 runs, "
        "counted from 0: 0, 2"
    )
    assert gaps(repeated(0, status="failed", steps=[]), repeated(1, status="failed", steps=[])) == []
    assert gaps(repeated(0, status="failed", steps=[]), repeated(0), repeated(1)) == []
