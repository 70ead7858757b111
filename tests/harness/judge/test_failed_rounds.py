"""A run that failed is left out as a round of its cell; the cell is judged by the others."""

import pytest

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.statistics import Ranking
from harness.record import ErrorPart, Record
from harness.tell.first_page import short_document
from harness.tell.report import details_document
from harness.tell.writers.markdown import render_details, render_markdown
from tests.harness.tell.cells import repeats
from tests.records import make_record, published

FAULT = ErrorPart(rank=1, kind="RuntimeError", message="Connection closed by peer")


def failed(record: Record) -> Record:
    """The same run as it is recorded where it fails in its last step."""
    return record.model_copy(update={"status": "failed", "error": FAULT, "steps": record.steps[:-1]})


def default(label: str, *numbers: int) -> Comparison:
    """The published default comparison, of which some runs of a cell failed."""
    return Comparison(
        failed(r) if r.backend.label == label and r.repeat in numbers else r for r in published("default")
    )


def order_of(comparison: Comparison) -> Ranking:
    return max(comparison.comparable.rankings.values(), key=lambda order: len(order.names))


@pytest.mark.parametrize("label", ["ddp", "zero3"])
def test_the_pairs_of_its_cell_are_judged_by_the_rounds_that_are_left(label: str) -> None:
    before, after = order_of(Comparison(published("default"))), order_of(default(label, 2))
    assert (after.base, set(after.names)) == (before.base, set(before.names))
    for name, ratio in after.to_base.items():
        lost = 1 if label in (name, after.base) else 0
        assert ratio.rounds == before.to_base[name].rounds - lost
        assert ratio.middle == pytest.approx(before.to_base[name].middle, rel=0.05)
    assert after.to_base["zero3"].order == "slower"


def test_where_every_round_of_the_base_failed_the_next_cell_is_it() -> None:
    numbers = {record.repeat for record in published("default")}
    order = order_of(default("ddp", *numbers))
    assert "ddp" not in order.names
    assert order.base in order.names


@pytest.mark.parametrize("question", ["all", "speed"])
def test_a_report_names_the_cell_and_how_many_of_its_runs_failed(question: ReportFocus) -> None:
    comparison = default("zero3", 2)
    runs = len([r for r in published("default") if r.backend.label == "zero3"])
    document = details_document(comparison, question=question)
    of = short_document(comparison, question, document)
    pictures = {picture.key: picture.key for picture in of.pictures()}
    assert of.details is not None
    texts = render_markdown(of, pictures, "", "d"), render_details(of.details, pictures, "r")
    short, details = (text.replace("\\", "") for text in texts)
    assert f"failed in 1 of {runs} runs: zero3 on 2 ranks" in short
    (row,) = (line for line in short.splitlines() if line.startswith("| zero3 ") and " % |" in line)
    assert f"(ok x{runs - 1}, failed x1)" in row
    assert f"without a result (failed): 1 of {runs} runs" in details
    assert "Connection closed by peer" in details


def test_a_round_that_diverged_is_not_left_out() -> None:
    """It did other work, so the cell is in no order."""
    good = repeats("fsdp", 0.5, 0.6, 0.5)
    nan = good[1].model_copy(update={"status": "diverged"})
    comparison = Comparison([make_record(), *repeats("ddp", 0.5, 0.5, 0.5), good[0], nan, good[2]])
    assert order_of(comparison).names == ("ddp",)


def test_figures_are_those_of_runs_with_a_result() -> None:
    slow = failed(repeats("fsdp", 0.5, 50.0)[1])
    comparison = Comparison([make_record(), *repeats("fsdp", 0.5), slow])
    group = next(group for group in comparison.groups if group.label == "fsdp")
    assert (group.status, group.parity) == ("ok x1, failed x1", "exact")
    assert group.step_seconds == pytest.approx([0.5] * len(group.step_seconds))
