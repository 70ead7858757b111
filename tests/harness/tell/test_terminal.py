"""What a terminal shows: it fits the width, and explains its marks."""

import pytest

from harness.judge.comparison import Comparison
from harness.tell import formats
from harness.tell.formats import WIDTH, fitted
from harness.tell.pictures.bars import drawn_name
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


@pytest.mark.parametrize("width", [80, 100])
def test_no_label_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "WIDTH", width)
    table, _, _ = terminal_table(comparison()).partition("\n~: ")
    body = table.splitlines()[3:]
    assert max(map(len, body)) <= width
    text = "".join(line.split()[0] for line in body if line.split())
    assert all(label in text for label in LABELS)


def test_a_long_word_breaks_at_its_hyphens_and_an_interval_does_not() -> None:
    rows = [["20261123-100319-fsdp1-hybrid-n2-r0-299849" * 2, "1.04 (0.54 to 1.15)", "word " * 20]]
    lines = fitted(rows, ["run", "speed", "why"]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "(0.54 to 1.15)" in "\n".join(lines)
    assert lines[2].split()[0].endswith("-")
    assert "".join(line[: line.find(" ")] for line in lines[2:4]) in rows[0][0]


def test_names_of_a_picture_that_would_look_the_same_are_whole() -> None:
    long = ["zero3:stage3_prefetch_bucket_size=1,offload=cpu", "zero3:stage3_param_persistence=1,offload=cpu"]
    assert len(drawn_name(long[0], long[:1])) < len(long[0])
    assert drawn_name(long[0], [*long, "ddp"]).startswith("zero3:stage3_pre")
    alike = [
        "fsdp1:auto_wrap=none,backward_prefetch=pre,forward_prefetch=true",
        "fsdp1:auto_wrap=none,backward_prefetch=post,forward_prefetch=true",
    ]
    assert [drawn_name(name, alike) for name in alike] == alike
