"""One ratio of speeds, wherever it is written: JSON, CSV, both reports, the terminal and README.md."""

import csv
import io
import re
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from statistics import median, stdev

import pytest

from harness.judge.comparison import Comparison
from harness.judge.facts import OWN_STEP, STEP
from harness.judge.statistics import NO_FIGURES, Interval, Order, Ratio
from harness.record.store import read_runs
from harness.tell.document import Document, Section
from harness.tell.formats import percent
from harness.tell.report import details_document
from harness.tell.tables import LEGEND, clock_words, ratio_text, results_table
from harness.tell.terminal import terminal_table
from harness.tell.writers.data import render_csv
from harness.tell.writers.markdown import render_markdown
from tests.records import make_ranks, make_record, make_steps, published_comparison
from tests.timed_records import processors

ROOT = Path(__file__).parents[3]
REPORTS = ("default", "explain-zero3-speed")
KEYS = list(NO_FIGURES)


def texts(name: str) -> dict[str, str]:
    """The ratio of each cell as it must be written, from the JSON document alone."""
    found = {}
    for row in published_comparison(name).as_json()["rows"]:
        base, ratio, low, high, order = (row[key] for key in KEYS)
        if base is not None:
            interval = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
            mark = interval if order != "open" else f"~{interval}"
            found[row["backend"]] = "1" if base == row["backend"] else mark
    assert len(found) > 5
    return found


def column(text: str, title: str) -> dict[str, str]:
    """A column of the first markdown table that has it, by label."""
    text = text.replace("\\", "")
    table = next(part for part in text.split("\n\n") if f"| {title} |" in part)
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    head, _, *lines = cells
    return {line[0]: line[head.index(title)] for line in lines}


@pytest.mark.parametrize("name", REPORTS)
def test_csv_holds_what_json_says(name: str) -> None:
    comparison = published_comparison(name)
    main, _ = render_csv(Document("", [Section("", "", [results_table(comparison)])]), "")
    lines = list(csv.DictReader(io.StringIO(main, newline="")))
    of_cells = {(row["backend"], row["world_size"]): row for row in comparison.as_json()["rows"]}
    assert len(lines) == len(of_cells)
    for line in lines:
        row = of_cells[line["backend"], int(line["world_size"])]
        assert [line[key] for key in KEYS] == ["" if row[key] is None else str(row[key]) for key in KEYS]


@pytest.mark.parametrize("file", ["report.md", "report.details.md"])
@pytest.mark.parametrize("name", REPORTS)
def test_reports_hold_what_json_says_bold_where_it_is_settled(name: str, file: str) -> None:
    text = (ROOT / "reports" / name / file).read_text(encoding="utf-8")
    shown, open_ = column(text, "speed / ddp"), "~"
    for label, ratio in texts(name).items():
        assert shown[label] == (ratio if ratio == "1" or ratio.startswith(open_) else f"**{ratio}**")
    assert LEGEND in text.replace("\\", "")


def test_the_terminal_and_the_readme_hold_what_json_says() -> None:
    table = terminal_table(published_comparison("default"), wide=True)
    in_readme = column((ROOT / "README.md").read_text(encoding="utf-8"), "speed here / ddp")
    for label, ratio in texts("default").items():
        assert re.search(rf"^ *{re.escape(label)} .* {re.escape(ratio)} ", table, re.MULTILINE), label
        assert in_readme.get(label, ratio).replace("**", "") == ratio
    assert "speed / ddp: in the same round, 95 % interval" in " ".join(table.split())


@pytest.mark.parametrize("name", REPORTS)
def test_the_verdict_calls_fastest_what_json_does_not_call_slower(name: str) -> None:
    text = (ROOT / "reports" / name / "report.md").read_text(encoding="utf-8").replace("\\", "")
    (answer,) = re.findall(r"^\| Fastest \| (.*?) \| \[", text, re.MULTILINE)
    fastest = answer.partition(" ")[0]
    orders = {row["backend"]: row["speed_order"] for row in published_comparison(name).as_json()["rows"]}
    assert fastest in {label for label, order in orders.items() if order in ("open", "equal", "faster", None)}
    slowest = [one.split(" ")[0] for one in answer.partition("speed: ")[2].split(", ")]
    assert slowest
    assert {orders[label] for label in slowest} == {"slower"}


@pytest.mark.parametrize(
    ("order", "low", "high", "text"),
    [
        ("slower", 0.8, 0.998, "0.90 (0.80 to <1.00)"), ("slower", 0.8, 0.994, "0.90 (0.80 to 0.99)"),
        ("faster", 1.002, 1.3, "1.11 (>1.00 to 1.30)"), ("open", 0.8, 1.0, "0.90 (0.80 to 1.00)"),
        ("equal", 0.98, 0.999, "0.90 (0.98 to 1.00)"),
    ],
)  # fmt: skip
def test_a_settled_interval_does_not_read_as_if_it_held_one(
    order: Order, low: float, high: float, text: str
) -> None:
    middle = 1.11 if order == "faster" else 0.9
    ratio = Ratio(rounds=7, middle=middle, extent=Interval(low, high), order=order)
    assert ratio_text(ratio) == text
    assert ratio_text(replace(ratio, extent=Interval(0.43, 0.996)), percent).endswith(
        "(43 % to <100 %)" if order == "slower" else "(43 % to 100 %)"
    )


NEIGHBOURS = Path(__file__).parent / "beside_neighbours.tar.xz"
"""Seven rounds of the default comparison, in turns, beside two programs that take a core for 1 to 6 seconds
and sleep as long."""


@cache
def beside_neighbours() -> Comparison:
    runs, problems = read_runs([NEIGHBOURS])
    assert not problems
    return Comparison(record for _, record in runs)


def test_neighbours_turn_no_order_and_hide_none_of_a_quarter() -> None:
    quiet = {row["backend"]: row["speed_ratio"] for row in published_comparison("default").as_json()["rows"]}
    orders = {row["backend"]: row["speed_order"] for row in beside_neighbours().as_json()["rows"]}
    slower = [name for name in orders if (quiet.get(name) or 1.0) < 0.75]
    assert len(slower) > 3
    assert {orders[name] for name in slower} == {"slower"}
    assert {orders[name] for name in orders.keys() - slower} <= {"open", "equal", "slower", None}


def test_time_without_what_others_took_spreads_less() -> None:
    """Beside neighbours; rounds of a quiet machine spread alike by both clocks."""
    found = {}
    for name, comparison in (("loaded", beside_neighbours()), ("quiet", published_comparison("default"))):
        wall, own = [], []
        for group in comparison.comparable.groups:
            times = [(row.figures[STEP], row.figures[OWN_STEP]) for row in group.rows]
            assert all(0 < mine <= all_ for all_, mine in times)
            spreads = [stdev(map(log, of_clock)) for of_clock in zip(*times, strict=True)]
            wall.append(spreads[0])
            own.append(spreads[1])
        found[name] = median(own) / median(wall)
    assert found["loaded"] < 0.5 < 0.95 < found["quiet"] < 1.2
    assert clock_words(published_comparison("strong-scaling")) == ""


def test_a_report_says_where_the_clocks_disagree() -> None:
    """FSDP takes a tenth longer, and neighbours take half of the machine from one or the other of a round."""
    made = [make_record()]
    for number in range(7):
        for label, seconds, lost in (("ddp", 0.5, number % 2 / 2), ("fsdp", 0.55, (1 - number % 2) / 2)):
            used = processors(
                process_seconds=4 * (1 - lost), machine_busy_seconds=8 * (1 - lost),
                machine_stolen_seconds=8 * lost,
            )  # fmt: skip
            ranks = [part.model_copy(update={"processors": used}) for part in make_ranks(2)]
            steps = make_steps(seconds=seconds / (1 - lost))
            made.append(
                make_record(label=label, repeat=number, run_id=f"{label}-{number}", steps=steps, ranks=ranks)
            )
    said = (
        "Counting only the ranks' own time: fsdp on 2 ranks is slower, "
        "0.91 (0.91 to 0.91) times ddp's speed (by wall time open)."
    )
    comparison = Comparison(made)
    details = details_document(comparison)
    pictures = {picture.key: f"{picture.key}.svg" for picture in details.pictures()}
    assert said in render_markdown(details, pictures, "", "")
