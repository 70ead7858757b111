"""What a terminal shows: it fits the width, and explains its marks."""

from harness.judge.comparison import Comparison
from harness.tell.narrow import WIDTH, narrow
from harness.tell.terminal import terminal_table
from tests.records import make_record

LABELS = (
    "single",
    "ddp",
    "fsdp:preset=library-defaults",
    "zero3:offload=cpu,stage3_prefetch_bucket_size=1",
)


def comparison() -> Comparison:
    return Comparison(make_record(label=label) for label in LABELS)


def test_the_table_fits_the_width_and_says_how_to_see_the_rest() -> None:
    lines = terminal_table(comparison()).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].endswith("--wide: all columns")


def test_the_wide_table_has_every_column_and_cuts_nothing() -> None:
    text = terminal_table(comparison(), wide=True)
    assert LABELS[-1] in text
    assert "textbook" in text
    assert "--wide" not in text


def test_marks_and_levels_in_the_table_are_explained_and_no_others() -> None:
    table, _, legend = terminal_table(comparison()).partition("\n~: ")
    assert " ~1.00 " in table
    assert legend.startswith("order open, see --repeats; exact: equal to the reference")
    assert "band:" not in legend


def test_a_cut_column_keeps_the_end_that_tells_runs_apart() -> None:
    rows = [["x" * 60 + "-tail", "y" * 60]]
    text = narrow(rows, ["run", "backend"], shrinks=("backend", "run"), keeps_end=("run",))
    assert "-tail" in text
    assert max(map(len, text.splitlines())) <= WIDTH
