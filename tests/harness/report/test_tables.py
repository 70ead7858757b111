from harness.compare.rows import make_rows
from harness.record import ErrorPart
from harness.report.tables import COLUMNS, cell_line, main_table
from tests.records import LOSSES, make_record, make_steps, make_weights


def cells(table: str) -> list[list[str]]:
    """Cells of a github table, header and rule left out."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_one_line_per_backend_and_world_in_the_order_given() -> None:
    records = [make_record(), make_record(label="ddp"), make_record(label="ddp", world_size=4)]
    lines = cells(main_table(make_rows(records), "github"))
    assert [line[:3] for line in lines] == [["single", "1", "ok"], ["ddp", "2", "ok"], ["ddp", "4", "ok"]]
    assert {len(line) for line in lines} == {len(COLUMNS)}


def test_figures_of_a_run_are_in_their_columns() -> None:
    (_, line) = cells(main_table(make_rows([make_record(), make_record(label="ddp")]), "github"))
    assert line == [
        "ddp", "2", "ok", "16.0", "2,048", "500 (500..500)", "2.00 (0.001)", "0.016", "0.004", "0.004",
        "0", "0", "exact",
    ]  # fmt: skip


def test_repeats_share_a_line_with_medians_and_the_worst_parity() -> None:
    slow = make_record(label="ddp", repeat=1, steps=make_steps(seconds=1.0))
    other = make_record(
        label="ddp", repeat=2, steps=make_steps([loss + 1e-5 for loss in LOSSES]),
        final_weights=make_weights("c" * 64),
    )  # fmt: skip
    lines = cells(main_table(make_rows([make_record(), make_record(label="ddp"), slow, other]), "github"))
    assert len(lines) == 2
    assert lines[1][4] == "2,048"
    assert lines[1][5] == "500 (500..1,000)"
    assert lines[1][10] == "1.0e-05"
    assert lines[1][12] == "tight"


def test_repeats_with_different_ends_are_counted() -> None:
    failed = make_record(label="ddp", repeat=1, status="failed", steps=[], ranks=[], comm=[])
    records = [make_record(), make_record(label="ddp"), failed, failed]
    assert cells(main_table(make_rows(records), "github"))[1][2] == "ok x1, failed x2"


def test_run_without_result_shows_not_available() -> None:
    failed = make_record(label="ddp", status="oom", steps=[], ranks=[], comm=[], windows=None)
    line = cells(main_table(make_rows([make_record(), failed]), "github"))[1]
    assert line[2:9] == ["oom", *["n/a"] * 6]
    assert line[12] == "unjudged"


def test_finished_cell_is_one_line_with_its_reason() -> None:
    error = ErrorPart(kind="RuntimeError", message="no\nmemory", rank=1)
    row = make_rows([make_record(label="ddp", status="failed", error=error)])[0]
    assert cell_line(row) == "ddp on 2 ranks: failed: RuntimeError (rank 1): no"


def test_finished_cell_is_one_line_with_its_figures() -> None:
    line = cell_line(make_rows([make_record(label="ddp")])[0])
    assert line == "ddp on 2 ranks: ok, loss 4.75, 2,048 tokens/s, step 500 ms, peak 2.00 MB"
