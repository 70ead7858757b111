"""Records for the tests of reports, and what sections and pictures hold."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from typing import Any, TypeVar

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Document, Folded, Picture, Section, Table
from harness.tell.first_page import short_document
from harness.tell.pictures.drawing import draw
from harness.tell.report import details_document
from harness.tell.sections.choice import ComparisonScope, comparison_scope
from harness.tell.writers.text import render_details, render_markdown
from tests.records import changed, make_communication, make_ranks, make_record, make_steps


def repeats(label: str, *seconds: float, world_size: int = 2, **changes: Any) -> list[Record]:
    """A run of the cell for each time of a step."""
    return [
        make_record(
            label=label, repeat=n, run_id=f"{label}-{world_size}-{n}", world_size=world_size,
            steps=make_steps(seconds=s), **changes,
        )
        for n, s in enumerate(seconds)
    ]  # fmt: skip


def stage_of(*records: Record) -> ComparisonScope:
    """Of records of which some succeeded."""
    found = comparison_scope(Comparison(records))
    assert found is not None
    return found


def growing(label: str, ranks: int, seconds: float, **changes: Any) -> Record:
    """A run of a job whose batch grows with the ranks, as weak scaling wants it."""
    per_step = {step: {"tokens": 512 * ranks} for step in range(4)}
    return make_record(
        label=label, world_size=ranks, run_id=f"{label}-{ranks}", job_id=f"{ranks:012d}",
        training={"global_batch_size": 4 * ranks}, steps=make_steps(seconds=seconds, changes=per_step),
        **changes,
    )  # fmt: skip


def with_world(record: Record, **changes: object) -> Record:
    return changed(record, world=changes)


def of_size(label: str, peak: int, *, states: int = 16_000, sent: int = 4_000_000) -> Record:
    """A run whose two ranks peak at `peak` bytes, hold `states` and send `sent` a step."""
    ranks = [
        rank.model_copy(
            update={"memory": [part.model_copy(update={"peak_bytes": peak}) for part in rank.memory]}
        )
        for rank in make_ranks(2, states)
    ]
    return make_record(label=label, ranks=ranks, comm=make_communication(2, payload_bytes=sent))


def page_of(runs: Iterable[Record] | Comparison, question: ReportFocus = "all") -> Document:
    """The first page of a report, with its details."""
    comparison = runs if isinstance(runs, Comparison) else Comparison(runs)
    return short_document(comparison, question, details_document(comparison, question=question))


def markdown_of(document: Document) -> tuple[str, str]:
    """A first page as markdown, and its details; pictures are not drawn."""
    pictures = {picture.key: f"{picture.key}.svg" for picture in document.pictures()}
    assert document.details is not None
    first = render_markdown(document, pictures, "", "report.details.md")
    return first, render_details(document.details, pictures, "report.md")


def timed(label: str, seconds: float, world_size: int = 2, repeat: int = 0, **changes: Any) -> Record:
    """A run whose every step took so long: 1024 tokens each."""
    return make_record(
        label=label, world_size=world_size, repeat=repeat, run_id=f"{label}-{world_size}-{repeat}",
        steps=make_steps(seconds=seconds), **changes,
    )  # fmt: skip


def made(picture: Picture | None) -> Picture:
    """The picture, which must be there."""
    assert picture is not None
    return picture


def rows_of(picture: Picture | None) -> list[dict[str, Any]]:
    """All rows of a picture's data."""
    rows: list[dict[str, Any]] = made(picture).chart()["data"]["values"]
    return rows


def texts(picture: Picture | None) -> list[str]:
    """Every text that the SVG shows."""
    svg = ElementTree.fromstring(draw(made(picture)))
    return ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]


def compared(*records: Record) -> Comparison:
    """The reference and these runs."""
    return Comparison([make_record(), *records])


Kind = TypeVar("Kind")


def blocks_in(section: Section | Folded | None, kind: type[Kind]) -> list[Kind]:
    """The blocks of this kind in a section, which must be there; folded ones too."""
    assert section is not None
    found = []
    for block in section.blocks:
        found += [block] if isinstance(block, kind) else []
        found += blocks_in(block, kind) if isinstance(block, Folded) else []
    return found


def lines_of(table: Table) -> list[dict[str, str]]:
    """The texts of a table by column."""
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, texts, strict=True)) for texts in table.texts()]
