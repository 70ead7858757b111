from harness.compare.rows import make_rows
from harness.record import ErrorPart
from harness.report.document import Items
from harness.report.sections.failures import failures_section
from tests.records import make_record


def test_repeats_of_a_cell_have_one_line_with_their_number() -> None:
    def failed(repeat: int, kind: str, message: str) -> dict[str, object]:
        error = ErrorPart(kind=kind, message=message, rank=0)
        return {"repeat": repeat, "status": "failed", "error": error}

    records = [
        make_record(label="ddp"),
        make_record(label="ddp", **failed(1, "RuntimeError", "port 1 is taken")),
        make_record(label="ddp", **failed(2, "RuntimeError", "port 2 is taken")),
        make_record(label="ddp", **failed(3, "ValueError", "no")),
        make_record(label="zero1", status="unsupported", reasons=["needs 4 ranks"]),
        make_record(label="zero2", status="unsupported", reasons=["needs 4 ranks"]),
    ]
    section = failures_section(make_rows(records))
    assert section is not None
    (items,) = section.blocks
    assert isinstance(items, Items)
    assert list(items.items) == [
        "ddp on 2 ranks, 2 of 4 runs: failed: RuntimeError (rank 0): port 1 is taken",
        "ddp on 2 ranks, 1 of 4 runs: failed: ValueError (rank 0): no",
        "zero1 and zero2 on 2 ranks: unsupported: needs 4 ranks",
    ]
