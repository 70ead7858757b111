"""One ratio of speeds, wherever it is written: JSON, CSV, both reports, the terminal and README.md."""

import csv
import io
import re
from functools import cache
from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.judge.ranking import NO_FIGURES
from harness.record.store import read_runs
from harness.tell.document import Document, Section
from harness.tell.order_words import LEGEND
from harness.tell.tables import results_table
from harness.tell.terminal import terminal_table
from harness.tell.writers.csv import render_csv

ROOT = Path(__file__).parents[3]
REPORTS = ("default", "explain-zero3-speed")
KEYS = list(NO_FIGURES)


@cache
def published(name: str) -> Comparison:
    return Comparison(record for _, record in read_runs([ROOT / "reports" / name / "runs.tar.xz"])[0])


def texts(name: str) -> dict[str, str]:
    """The ratio of each cell as it must be written, from the JSON document alone."""
    found = {}
    for row in published(name).as_json()["rows"]:
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
    comparison = published(name)
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
    table = terminal_table(published("default"), wide=True)
    in_readme = column((ROOT / "README.md").read_text(encoding="utf-8"), "speed here / ddp")
    for label, ratio in texts("default").items():
        assert re.search(rf"^ *{re.escape(label)} .* {re.escape(ratio)} ", table, re.MULTILINE), label
        assert in_readme.get(label, ratio).replace("**", "") == ratio
    assert "~: order open, see --repeats" in table
