"""What reports/README.md says of published reports holds for each of them."""

from pathlib import Path

import pytest

from harness.job.experiment import ReportFocus, speeds_are_asked
from harness.judge.comparison import Comparison
from harness.judge.statistics import interval_runs
from harness.record.store import ARCHIVE_NAME
from harness.tell.document import Table
from harness.tell.first_page import short_document
from harness.tell.manifest import read_manifest
from harness.tell.report import details_document
from harness.tell.tables import SPEEDS
from harness.tell.writers.markdown import render_details, render_markdown
from tests.records import published_comparison
from tests.representatives import first

REPORTS = Path(__file__).resolve().parents[3] / "reports"
FOLDERS = sorted(str(path.parent.relative_to(REPORTS)) for path in REPORTS.rglob(ARCHIVE_NAME))
FOLDERS = [folder for folder in FOLDERS if (REPORTS / folder / "report.md").is_file()]
FEW = ("default", "explain-zero3-speed", "full-matrix")
"""One that ranks speeds, one that was asked for them, one that was not."""
FIGURES_OF_SPEED = ("tokens/s", "samples/s", "step ms", "fastest", "slowest")
ORDERS = (
    "is fastest",
    "are fastest",
    "fastest is",
    "faster than",
    "is slowest",
    "are slowest",
    "Pareto frontier of",
)


def text_of(comparison: Comparison, question: ReportFocus) -> str:
    """The report in markdown, its details included and its title, which asks, left out."""
    details = details_document(comparison, question=question)
    document = short_document(comparison, question, details)
    pictures = {picture.key: f"{picture.key}.svg" for picture in document.pictures()}
    assert document.details is not None
    _, _, short = render_markdown(document, pictures, "", "d").partition("\n")
    return short + render_details(document.details, pictures, "r")


@pytest.mark.parametrize("folder", first(FEW, FOLDERS))
def test_a_report_states_no_speed_unless_it_was_asked_and_no_order_without_enough_runs(folder: str) -> None:
    report = REPORTS / folder / "report.md"
    question = read_manifest(report.read_text(encoding="utf-8"), report).manifest.question
    comparison = published_comparison(folder)
    excluded: tuple[str, ...] = ()
    if not speeds_are_asked(question):
        excluded = FIGURES_OF_SPEED
    elif not any(order.is_judged for order in comparison.comparable.rankings.values()):
        excluded = ORDERS
    text = text_of(comparison, question) if excluded else ""
    assert [words for words in excluded if words in text] == []


@pytest.mark.parametrize("question", ["parity", "memory"])
def test_no_line_of_a_report_on_another_question_tells_a_speed(question: ReportFocus) -> None:
    text = text_of(published_comparison("strong-scaling"), question)
    assert [words for words in FIGURES_OF_SPEED if words in text] == []


def test_repeats_that_the_page_calls_for_are_those_that_an_interval_needs() -> None:
    page = (REPORTS / "README.md").read_text(encoding="utf-8")
    assert f"from {interval_runs()} rounds on" in page
    assert all(order.is_judged for order in published_comparison("default").comparable.rankings.values())


def test_a_report_on_parity_has_no_column_of_speed() -> None:
    document = details_document(published_comparison("explain-clipping"), question="parity")
    columns = {column.key for table in document.tables() for column in table.columns}
    assert columns.isdisjoint(SPEEDS)
    assert not columns & {"samples_per_second", "p95_step_seconds", "step_seconds_least"}
    assert {section.key for section in document.sections}.isdisjoint({"time", "overlap", "scaling"})
    asked = details_document(published_comparison("explain-clipping"))
    assert set(SPEEDS) & {column.key for table in asked.tables() for column in table.columns}
    assert any(isinstance(block, Table) and block.key == "time" for block in asked.blocks())
