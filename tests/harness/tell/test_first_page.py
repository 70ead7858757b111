"""What the short report holds, and that it stays short."""

from itertools import product
from typing import Any

import pytest

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Document, Picture
from harness.tell.first_page import MOST_PICTURES, MOST_WORDS, PICTURES, short_document, words_of
from harness.tell.report import details_document
from harness.tell.writers.markdown import render_details, render_markdown
from tests.harness.tell.cells import growing, repeats
from tests.records import (
    NORMS,
    make_communication,
    make_record,
    make_steps,
    make_weights,
    published_comparison,
)
from tests.representatives import cheap, first

QUESTIONS: tuple[ReportFocus, ...] = ("all", "speed", "memory", "footprint", "parity", "scaling")
ASKED = [("full_matrix", "all"), ("many", "all"), ("many", "speed"), ("many", "parity")]
FEW = [make_record(), *repeats("ddp", 0.5), *repeats("fsdp", 0.6)]


def document(runs: list[Record] | Comparison, question: ReportFocus) -> Document:
    comparison = runs if isinstance(runs, Comparison) else Comparison(runs)
    return short_document(comparison, question, details_document(comparison, question=question))


def own_pictures(of: Document) -> list[str]:
    return [block.key for section in of.sections for block in section.blocks if isinstance(block, Picture)]


def both_texts(of: Document) -> str:
    """The short report and its details."""
    pictures = {picture.key: picture.key for picture in of.pictures()}
    assert of.details is not None
    return render_markdown(of, pictures, "", "d") + render_details(of.details, pictures, "r")


@pytest.fixture(scope="module")
def full_matrix() -> Comparison:
    return published_comparison("full-matrix")


@pytest.fixture(scope="module")
def many() -> Comparison:
    """200 cells with long names on four numbers of ranks; some ran out of memory, some diverged."""
    records = [make_record()]
    for number in range(50):
        label = f"zero3:offload=cpu,reduce_bucket_size={1000 + number}"
        changes: dict[str, Any] = {"steps": make_steps(seconds=0.5 + number / 100)}
        if number % 7 == 0:
            doubled = make_steps(norms=[2 * norm for norm in NORMS])
            changes = {"steps": doubled, "final_weights": make_weights("c" * 64)}
        elif number % 11 == 0:
            changes = {"status": "oom", "steps": []}
        for size in (1, 2, 4, 8):
            comm = make_communication(size, payload_bytes=4000 * (number + 1)) if size > 1 else []
            run = make_record(
                label=label, world_size=size, run_id=f"{number}-{size}", comm=comm, **changes
            )  # fmt: skip
            records.append(run)
    return Comparison(records)


@pytest.mark.parametrize(
    ("of", "question"),
    [
        *cheap([("many", "all")], ASKED),
        *first([], [case for case in product(("full_matrix", "many"), QUESTIONS) if case not in ASKED]),
    ],
)
def test_whatever_the_number_of_cells_the_report_is_short(
    of: str, question: ReportFocus, request: pytest.FixtureRequest
) -> None:
    made = document(request.getfixturevalue(of), question)
    assert words_of(made) <= MOST_WORDS
    assert len(own_pictures(made)) <= MOST_PICTURES


def test_no_question_has_too_many_pictures() -> None:
    assert set(PICTURES) == set(QUESTIONS)
    assert all(len(makers) <= MOST_PICTURES for makers in PICTURES.values())


def test_marks_of_tables_are_no_words() -> None:
    made = document(FEW, "all")
    text = render_markdown(made, {p.key: p.key for p in made.pictures()}, "", "report.details.md")
    assert words_of(made) < len(text.split())


def test_the_sections_are_in_the_order_of_a_reader() -> None:
    assert [section.key for section in document(FEW, "all").sections] == ["verdict", "summary", "check"]


def test_every_line_refers_to_details_that_exist() -> None:
    made = document(FEW, "all")
    text = render_markdown(made, {p.key: p.key for p in made.pictures()}, "", "report.details.md")
    assert made.details is not None
    links = {link.partition(")")[0] for link in text.split("report.details.md#")[1:]}
    assert links
    assert links <= {section.key for section in made.details.sections}


def test_a_picture_of_the_short_report_is_not_repeated_in_the_details() -> None:
    made = document(FEW, "all")
    assert made.details is not None
    shown = set(own_pictures(made))
    assert shown
    assert shown.isdisjoint(picture.key for picture in made.details.pictures())


def test_weak_scaling_has_no_section_on_strong_scaling_and_no_alarm_about_jobs() -> None:
    records = [growing(label, size, 0.5) for label in ("ddp", "fsdp") for size in (1, 2)]
    made = document(records, "scaling")
    keys = {picture.key for picture in made.pictures()}
    assert "weak-scaling" in keys
    assert "strong-scaling" not in keys
    text = both_texts(made)
    assert "trong scaling" not in text
    assert "several-jobs" not in text


@pytest.mark.parametrize("question", ["parity", "memory"])
def test_what_was_not_asked_is_not_answered(question: ReportFocus) -> None:
    text = both_texts(document(FEW, question))
    assert [words for words in ("tokens/s", "step ms", "Fastest", "slowest") if words in text] == []
