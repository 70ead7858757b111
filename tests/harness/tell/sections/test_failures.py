from harness.judge.comparison import Comparison
from harness.record import ErrorPart
from harness.tell.document import Items
from harness.tell.sections.results import failures_section
from tests.records import make_record


def test_one_error_of_several_cells_is_told_once_whichever_rank_it_met_first() -> None:
    records = [
        make_record(
            label=label, repeat=repeat, status="oom",
            error=ErrorPart(kind="OutOfMemoryError", message="no memory", rank=rank),
        )
        for rank, label in enumerate(("ddp", "fsdp"))
        for repeat in range(2)
    ]  # fmt: skip
    (items,) = failures_section(Comparison(records)).blocks
    assert isinstance(items, Items)
    assert list(items.items) == [
        "ddp and fsdp on 2 ranks, 2 of 2 runs of each: oom: OutOfMemoryError: no memory"
    ]


def test_cells_of_two_jobs_are_told_apart() -> None:
    records = [
        make_record(label="ddp", job_id=job * 12, status="unsupported", reasons=["needs 4 ranks"])
        for job in "ab"
    ]
    (items,) = failures_section(Comparison(records)).blocks
    assert isinstance(items, Items)
    assert [str(item).split(": ")[0] for item in items.items] == [
        f"ddp on 2 ranks, job {job * 12}" for job in "ab"
    ]


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
    section = failures_section(Comparison(records))
    assert section is not None
    (items,) = section.blocks
    assert isinstance(items, Items)
    assert list(items.items) == [
        "ddp on 2 ranks, 2 of 4 runs: failed: RuntimeError (rank 0): port 1 is taken",
        "ddp on 2 ranks, 1 of 4 runs: failed: ValueError (rank 0): no",
        "zero1 and zero2 on 2 ranks: unsupported: needs 4 ranks",
    ]
