"""The tables as CSV and HTML, word for word; that of markdown is in test_markdown.py."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.record import BackendPart, ErrorPart, Record
from harness.tell.document import Column, Document, Shown, Table
from harness.tell.report import details_document, details_name, write_report
from harness.tell.writers.html import render_html, table_html
from harness.tell.writers.text import MANIFEST, render_csv
from tests.harness.tell.cells import markdown_of, page_of
from tests.records import (
    LOSSES,
    make_communication,
    make_effective,
    make_record,
    make_steps,
    make_weights,
    written,
)

GOLDEN = Path(__file__).parent.parent.parent / "golden"


def fixed_records() -> list[Record]:
    """One of each sort: reference, exact, tight, unsupported, failed, diverged."""
    zero3 = "zero3:offload=cpu,reduce_bucket_size=1000"
    return [
        make_record(),
        make_record(label="ddp"),
        make_record(
            label=zero3,
            steps=make_steps([loss + 1e-5 for loss in LOSSES], seconds=0.25),
            final_weights=make_weights("c" * 64),
            comm=make_communication(2, "all_gather", 8000) + make_communication(2, "reduce_scatter"),
            backend=BackendPart(
                label=zero3, name="zero3", options={"offload": "cpu"},
                effective=make_effective(strategy="ZeRO-3"), native_config={"stage": 3},
                versions={"deepspeed": "0.19.8"},
            ),
        ),
        make_record(
            label="fsdp1-hybrid", status="unsupported", reasons=["needs 4 ranks, not 2"], steps=[], ranks=[],
            comm=[], windows=None, initial_weights=None, final_weights=None,
            backend=BackendPart(label="fsdp1-hybrid", name="fsdp1-hybrid"),
        ),
        make_record(
            label="fsdp", status="failed", steps=[], ranks=[], comm=[], windows=None,
            initial_weights=None, final_weights=None,
            error=ErrorPart(kind="RuntimeError", message="no | such `device`\nmore", rank=1),
            backend=BackendPart(label="fsdp", name="fsdp"),
        ),
        make_record(
            label="zero1", steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0)), final_weights=make_weights("e" * 64)
        ),
    ]  # fmt: skip


def report_of(folder: Path, records: list[Record]) -> Path:
    """The short report, with its details next to it."""
    return write_report(written(folder / "runs", *records), folder / "report.md")


def hold(text: str, golden: Path, update: bool) -> None:
    if update:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_report_is_the_golden_one(tmp_path: Path, update_golden: bool) -> None:
    report = report_of(tmp_path, fixed_records())
    for path in (report, report.with_name(details_name(report))):
        # Digests follow from the schema, versions from the environment, neither from the report.
        text = re.sub(r"\b[0-9a-f]{64}\b", "0" * 64, path.read_text(encoding="utf-8"))
        text = re.sub(r"\b[0-9a-f]{16}\b(?= *\|$)", "0" * 16, text, flags=re.MULTILINE)
        hold(re.sub(r"(vl-convert-python )[\w.]+\w", r"\g<1>0.0.0", text), GOLDEN / path.name, update_golden)


def test_commands_can_be_pasted_into_a_shell() -> None:
    record = make_record(command=["harness", "run", "--set", "model.config={hidden_size: 32}"])
    assert "harness run --set 'model.config={hidden_size: 32}'" in markdown_of(page_of([record]))[1]


def test_report_without_any_step_has_no_picture(tmp_path: Path) -> None:
    failed = make_record(
        status="failed", steps=[], ranks=[], comm=[], error=ErrorPart(kind="Exit", message="gone", rank=0)
    )
    written = report_of(tmp_path, [failed])
    assert "## Loss" not in written.with_name(details_name(written)).read_text()
    assert not list(tmp_path.glob("*.svg"))


def strange(text: str) -> list[Record]:
    part = BackendPart(label=text, name="ddp", effective=make_effective(), native_config={"note": text})
    return [make_record(), make_record(label="ddp", backend=part, run_id=f"run-{text}")]


def outside_code(text: str) -> str:
    return re.sub(r"^(`{3,})\w*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_names_in_summaries_are_not_marked_up_twice() -> None:
    text = markdown_of(page_of(strange("zero3:reduce_bucket_size=5")))[1]
    assert "<summary>zero3:reduce_bucket_size=5, 2 ranks</summary>" in text


def test_backticks_in_values_do_not_end_a_code_block() -> None:
    records = [make_record(command=["harness", "--set", "a=\n```\n# broken out"]), *strange("```")]
    text = outside_code("".join(markdown_of(page_of(records))))
    assert "broken out" not in text
    assert "native_config" not in text


def test_run_that_ended_early_without_its_ranks_has_a_report(tmp_path: Path) -> None:
    """A launcher writes the record of ranks that died: steps may be there and ranks not, or the reverse."""
    error = ErrorPart(kind="OutOfMemoryError", message="no memory left", rank=0)
    early = make_record(
        label="ddp", status="oom", error=error, steps=make_steps()[:2], ranks=[], windows=None
    )
    late = make_record(label="fsdp", status="oom", error=error, steps=[])
    text = report_of(tmp_path, [make_record(), early, late]).read_text()
    assert "out of memory: ddp and fsdp on 2 ranks" in text


HTML_TABLE = re.compile(r'<div class="table">.*?</div>', flags=re.DOTALL)


def written_tables(document: Document, form: str) -> list[str]:
    """Each table as the writer of a format puts it."""
    pictures = {picture.key: "picture" for picture in document.pictures()}
    match form:
        case "html":
            return HTML_TABLE.findall(render_html(document, pictures, "manifest"))
        case _:
            main, others = render_csv(document, "manifest")
            return [main, *(text for key, text in others.items() if key != MANIFEST)]


@pytest.mark.parametrize("form", ["csv", "html"])
def test_tables_are_the_golden_ones(form: str, update_golden: bool) -> None:
    document = details_document(Comparison(fixed_records()))
    found = written_tables(document, form)
    assert len(found) == len(document.tables())
    text = "\n".join(table.rstrip() + "\n" for table in found)
    hold(text, GOLDEN / f"tables.{form}", update_golden)


BACKEND, RANKS, PARITY = (
    Column("backend", "backend"), Column("world_size", "ranks"), Column("parity", "parity"),
)  # fmt: skip
VALUE = Column("value", "value")


def html_of(columns: Sequence[Column], *rows: list[Any]) -> str:
    return table_html(Table(key="t", columns=columns, rows=rows))


def test_rows_that_stand_together_by_ranks_are_a_group() -> None:
    text = html_of((BACKEND, RANKS), ["ddp", 2], ["zero3", 2], ["ddp", 4])
    assert [body.count("<tr") for body in re.findall(r"<tbody>.*?</tbody>", text, re.DOTALL)] == [2, 1]


def test_rows_whose_order_mixes_ranks_are_one_group() -> None:
    text = html_of((BACKEND, RANKS), ["ddp", 2], ["ddp", 4], ["zero3", 2], ["zero3", 4])
    assert text.count("<tbody>") == 1


@pytest.mark.parametrize(
    ("column", "value", "attribute"),
    [
        (PARITY, "exact", ' data-value="0"'), (PARITY, "diverged", ' data-value="3"'),
        (PARITY, None, " data-unknown"), (VALUE, 1.5, ' data-value="1.5"'),
        (VALUE, float("inf"), ' data-value="Infinity"'), (VALUE, float("nan"), " data-unknown"),
        (VALUE, Shown(3, "three"), ' data-value="3"'), (VALUE, "text", ""), (VALUE, True, ""),
    ],
)  # fmt: skip
def test_a_cell_is_sorted_by_value_or_meaning(column: Column, value: Any, attribute: str) -> None:
    assert f'<td class="number"{attribute}>' in html_of((column,), [value])
