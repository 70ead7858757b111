import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding, statements
from harness.record import Record
from tests.records import ENVIRONMENT, make_record


def missing(*records: Record) -> list[Finding]:
    comparison = Comparison([make_record(), *records])
    return [finding for finding in comparison.findings if finding.id == "runs-missing"]


def run(repeat: int, label: str = "ddp", command: str = "harness compare", **changes: object) -> Record:
    name = f"{label}-{repeat}"
    return make_record(label=label, repeat=repeat, run_id=name, command=command.split(), **changes)


def test_a_gap_is_named() -> None:
    (finding,) = missing(run(0), run(2), run(4))
    assert finding.values == {"missing": [1, 3], "runs": 5}
    assert finding.message == ("ddp on 2 ranks: missing from the records: 2 of 5 runs, counted from 0: 1, 3")


@pytest.mark.parametrize("option", ["--repeats 3", "--repeats=3"])
def test_the_command_says_how_many_there_should_be(option: str) -> None:
    asked = f"harness compare {option}"
    others = [run(number, label="fsdp", command=asked) for number in range(3)]
    (finding,) = missing(run(0, command=asked), run(1), *others)
    assert (finding.backends, finding.values) == (("ddp",), {"missing": [2], "runs": 3})
    assert "missing from the records: 1 of 3 runs, counted from 0: 2" in finding.message


def test_the_first_runs_that_another_command_takes_over_are_all_that_it_asked_for() -> None:
    """A comparison of one run each, beside records of an earlier one of two."""
    earlier = "harness compare --repeats 2"
    taken = [run(0, label=label, command=earlier) for label in ("ddp", "fsdp")]
    assert missing(*taken, run(0, label="zero1")) == []


def test_cells_that_lack_the_same_runs_are_told_together() -> None:
    found = missing(run(1), run(1, label="zero1"))
    (told,) = statements(found)
    assert told.sentence.startswith(
        "ddp and zero1 on 2 ranks: missing from the records: 1 of 2 runs, counted from 0: 0"
    )


@pytest.mark.parametrize(
    "records",
    [
        [run(0), run(1)],
        [run(0, command="harness compare --repeats 1")],
        [run(0, command="harness compare --repeats all")],
        # Runs of a cell that were made on two machines stand apart in the tables.
        [run(0), run(1, environment=ENVIRONMENT | {"cpu": "another"})],
        [run(0, command="harness compare --repeats 3", status="unsupported", reasons=["no"], steps=[])],
    ],
)
def test_without_a_gap_nothing_is_said(records: list[Record]) -> None:
    assert missing(*records) == []


def test_runs_that_failed_are_told_as_left_out_where_others_have_a_result() -> None:
    (finding,) = missing(run(0, status="failed", steps=[]), run(1), run(2, status="oom", steps=[]), run(3))
    assert finding.values == {"without_result": [0, 2], "runs": 4}
    assert finding.message == (
        "ddp on 2 ranks: left out of figures and speeds, without a result (failed, oom): 2 of 4 runs, "
        "counted from 0: 0, 2"
    )
    assert missing(run(0, status="failed", steps=[]), run(1, status="failed", steps=[])) == []
    assert missing(run(0, status="failed", steps=[]), run(0), run(1)) == []
