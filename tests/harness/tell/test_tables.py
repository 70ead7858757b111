"""What a terminal shows: it fits the width, and explains its marks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.record import ErrorPart, Record
from harness.tell import formats
from harness.tell.formats import WIDTH, fitted, megabytes, milliseconds, number, percent, scientific
from harness.tell.pictures.plots import drawn_name
from harness.tell.tables import cell_line, results_table, spread_table
from harness.tell.terminal import terminal_table
from tests.harness.tell.cells import lines_of, repeats
from tests.records import LOSSES, make_record, make_steps, make_weights


def lines(*records: Record) -> list[dict[str, str]]:
    """Lines of the main table by column."""
    return lines_of(results_table(Comparison(records)).for_people())


def timed(label: str, *rates: float) -> list[Record]:
    """Repeats that train so many tokens per second."""
    return repeats(label, *(1024 / rate for rate in rates))


def test_figures_of_a_run_are_in_their_columns() -> None:
    (_, line) = lines(make_record(), make_record(label="ddp"))
    assert line == {
        "backend": "ddp", "world_size": "2", "status": "ok", "tokens_per_second": "2,048",
        "speed_ratio": "n/a", "step_seconds": "500", "peak_bytes": "2.00 (0.001)",
        "model_state_bytes": "0.016", "sent_bytes_per_step": "0.004",
        "expected_sent_bytes_per_step": line["expected_sent_bytes_per_step"],
        "textbook_sent_bytes_per_step": "0.004", "max_loss_difference": "0",
        "max_grad_norm_difference": "0", "parity": "exact",
    }  # fmt: skip


def test_jobs_of_a_report_are_told_apart_in_a_column() -> None:
    found = lines(make_record(), make_record(job_id="b" * 12))
    assert [line["job_id"] for line in found] == ["0123456789ab", "b" * 12]


def test_repeats_share_a_line_with_medians_and_the_worst_parity() -> None:
    slow = make_record(label="ddp", repeat=1, steps=make_steps(seconds=1.0))
    other = make_record(
        label="ddp", repeat=2, steps=make_steps([loss + 1e-5 for loss in LOSSES]),
        final_weights=make_weights("c" * 64),
    )  # fmt: skip
    (_, line) = lines(make_record(), make_record(label="ddp"), slow, other)
    assert (line["tokens_per_second"], line["step_seconds"]) == ("2,048", "500")
    assert (line["max_loss_difference"], line["parity"]) == ("1.0e-05", "tight")


@pytest.mark.parametrize(
    ("rates", "ratios"),
    [
        (
            {"ddp": [1000, 1010] * 3, "fsdp": [1020, 1000] * 3, "zero3": [5, 6] * 3},
            ["1", "0.00545 (0.005 to 0.00594)", "1.00 (0.99 to 1.02)"],
        ),
        ({"ddp": [1000, 1001, 1002], "fsdp": [2000, 2001, 2002]}, ["1", "~2.00"]),
    ],
)
def test_a_speed_is_a_ratio_to_ddp_with_its_interval(
    rates: dict[str, list[float]], ratios: list[str]
) -> None:
    """That of few rounds is open."""
    found = lines(*(record for label, of_label in rates.items() for record in timed(label, *of_label)))
    assert [line["speed_ratio"] for line in found] == ratios


def spread(*rates: float) -> dict[str, object]:
    table = spread_table(Comparison(timed("ddp", *rates)))
    return dict(zip((column.key for column in table.columns), table.values()[0], strict=True))


def test_spread_holds_the_range_of_the_runs_and_of_twenty_steps_the_percentile() -> None:
    line = spread(1024, 512, 256)
    assert (line["tokens_per_second_least"], line["tokens_per_second_most"]) == (256, 1024)
    assert (line["runs"], line["steps"]) == (3, 6)
    # Three runs give no interval, and of six steps the percentile would be the largest.
    assert not {"tokens_per_second_low", "tokens_per_second_high", "step_seconds_p95"} & line.keys()
    line = spread(*[1024, 512] * 5)
    assert (line["steps"], line["step_seconds_p95"]) == (20, pytest.approx(2.0))


ERROR = ErrorPart(kind="RuntimeError", message="no\nmemory", rank=1)
UNTIMED = [replace(step, window="warmup") for step in make_steps()]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"status": "failed", "error": ERROR}, "failed: RuntimeError (rank 1): no"),
        ({}, "ok, loss 4.75, 2,048 tokens/s, step 500 ms, peak 2.00 MB"),
        ({"steps": UNTIMED, "ranks": []}, "ok, loss 4.75, not timed"),
    ],
)
def test_finished_cell_is_one_line_with_its_reason_or_figures(changes: dict[str, Any], line: str) -> None:
    assert cell_line(Comparison([make_record(label="ddp", **changes)]).rows[0]) == f"ddp on 2 ranks: {line}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0, "0"), (1234567, "1,234,567"), (100, "100"), (99.94, "99.9"), (12.34, "12.3"),
        (1.005, "1.00"), (9.876, "9.88"), (0.1234, "0.123"), (-12.34, "-12.3"), (0.00001, "1e-05"),
    ],
)  # fmt: skip
def test_numbers_keep_three_places(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (megabytes, 1_500_000, "1.50"), (megabytes, None, "n/a"), (milliseconds, 0.25, "250"),
        (milliseconds, None, "n/a"), (scientific, 1.234e-7, "1.2e-07"), (scientific, 0.0, "0"),
        (scientific, None, "n/a"),
    ],
)  # fmt: skip
def test_units_are_megabytes_milliseconds_and_two_places_with_exponent(
    show: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert show(value) == text


LABELS = ("single", "ddp", "fsdp:preset=library-defaults", "zero3:offload=cpu,stage3_prefetch_bucket_size=1")


def comparison() -> Comparison:
    return Comparison(make_record(label=label) for label in LABELS)


def test_the_wide_table_has_every_column_and_cuts_nothing() -> None:
    text = terminal_table(comparison(), wide=True)
    assert LABELS[-1] in text
    assert "textbook" in text
    assert "--wide" not in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_the_width_cuts_no_label_and_explains_its_marks_and_levels(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "WIDTH", width)
    shown = terminal_table(comparison())
    assert max(map(len, shown.splitlines())) <= width
    table, _, legend = shown.partition("\nn/a: ")
    assert " ~1.00 " in table
    legend = " ".join(legend.split())
    assert "95 % interval; ~: undecided. Machines drift" in legend
    assert "exact: equal to the reference" in legend
    assert not any(words in legend for words in ("band:", "bold:", "Ratios:", "†", "*:"))
    assert legend.endswith("--wide: all columns.")
    body = table.splitlines()[3:]
    assert max(map(len, body)) <= width
    text = "".join(line.split()[0] for line in body if line.split())
    assert all(label in text for label in LABELS)


def test_a_terminal_names_where_the_reason_stands_that_nothing_was_judged() -> None:
    assert "unjudged: no reference to compare with" in terminal_table(Comparison([make_record(label="ddp")]))


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


def test_shares_need_no_exponents() -> None:
    assert [percent(share) for share in (0, 9e-9, 4e-6, 0.004, 0.976)] == [
        "0 %", "< 0.0001 %", "0.0004 %", "0.4 %", "98 %",
    ]  # fmt: skip
