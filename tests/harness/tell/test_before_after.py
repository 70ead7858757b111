from harness.judge.comparison import Comparison
from harness.record import ErrorPart, Record
from harness.tell.before_after import before_after
from harness.tell.document import Document
from harness.tell.writers.markdown import render_markdown
from tests.records import make_record


def rows(**status: str) -> Comparison:
    """The reference and a run of each backend, with its status."""
    return Comparison([make_record(), *(_run(label, how) for label, how in status.items())])


def _run(label: str, status: str) -> Record:
    error = None if status == "ok" else ErrorPart(kind="Exit", message="gone")
    return make_record(label=label, status=status, error=error)


def section(document: Document, key: str) -> str:
    only = Document("", [section for section in document.sections if section.key == key])
    return render_markdown(only, {}, "", "")


def test_lost_and_new_cells_are_in_the_verdict() -> None:
    before = rows(ddp="ok", zero1="ok", fsdp="oom")
    text = section(before_after(before, rows(ddp="failed", fsdp="ok", zero3="ok")), "verdict")
    assert "Lost, with their status after: ddp on 2 ranks (failed) and zero1 on 2 ranks (" in text
    assert "absent" in text
    assert "New, with their status before: fsdp on 2 ranks (oom) and zero3 on 2 ranks (" in text


def test_equal_sides_have_no_empty_table() -> None:
    document = before_after(rows(ddp="ok"), rows(ddp="ok"))
    assert all(table.rows for table in document.tables())
    assert "No figure of these cells changed beyond noise." in section(document, "verdict")
    assert "None differs." in section(document, "changes")
