"""Published reports carry what they were computed from, and this code still computes the same."""

import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from statistics import median, stdev

import pytest

from benchmarks.published_reports import MOST_MEGABYTES
from benchmarks.publishing import REPORTS, render_again
from harness.job.experiment import ReportFocus, speeds_are_asked
from harness.judge.comparison import Comparison
from harness.judge.facts import OWN_STEP, STEP
from harness.judge.statistics import NO_FIGURES, Interval, Order, Ratio, interval_runs
from harness.record.store import ARCHIVE_NAME, RECORD_NAME, read_archive, read_runs
from harness.tell.first_page import MOST_PICTURES, MOST_WORDS
from harness.tell.formats import percent
from harness.tell.manifest import read_manifest
from harness.tell.tables import ratio_text
from tests.gpu_stub.gallery import page as stub_page
from tests.harness.cli.command_line import harness
from tests.harness.tell.cells import markdown_of, page_of
from tests.records import published_comparison
from tests.representatives import first
from tests.traps.gallery import page

pytestmark = pytest.mark.long(seconds=100)
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "reports"
PUBLISHED = sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("report.md"))


@pytest.mark.parametrize("folder", PUBLISHED)
def test_records_lie_beside_a_published_report_and_git_keeps_them(folder: str) -> None:
    archive = FOLDER / folder / ARCHIVE_NAME
    assert read_archive(archive, named=RECORD_NAME)
    if (ROOT / ".git").exists():
        asked = subprocess.run(["git", "check-ignore", archive], cwd=ROOT, capture_output=True, check=False)
        assert (asked.returncode, asked.stdout) == (1, b"")


def test_published_reports_are_small_and_hold_each_picture_once() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "runs" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MOST_MEGABYTES * 1_000_000
    assert {path.suffix for path in files} == {".md", ".html", ".svg", ".json", ".xz"}


@pytest.mark.parametrize("folder", PUBLISHED)
def test_a_published_report_is_read_in_minutes(folder: str) -> None:
    """Alternative texts count as words; marks of tables and lists of records do not."""
    text = (FOLDER / folder / "report.md").read_text(encoding="utf-8").partition("\n## Records")[0]
    shown = re.sub(r"^<!-- harness-report: .* -->$", "", text, flags=re.MULTILINE)
    assert sum(any(map(str.isalnum, word)) for word in shown.split()) <= MOST_WORDS
    assert shown.count("![") <= MOST_PICTURES


def test_published_reports_have_titles_of_their_own() -> None:
    own = [FOLDER / folder / "report.md" for folder in PUBLISHED if not folder.startswith("gpu/")]
    titles = [report.read_text(encoding="utf-8").partition("\n")[0] for report in own]
    assert sorted(set(titles)) == sorted(titles)


@pytest.mark.exhaustive
def test_a_report_that_is_rendered_again_has_the_same_bytes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / "traps" / "1-rank", tmp_path / "copy"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert render_again(tmp_path) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", PUBLISHED)
def test_a_published_report_holds(folder: str) -> None:
    for report in (name for name in REPORTS if (FOLDER / folder / name).is_file()):
        done = harness("verify", report, cwd=FOLDER / folder)
        assert done.returncode == 0, f"{report}: `make reports` renders it again: {done.stdout}{done.stderr}"


@pytest.mark.exhaustive
def test_the_gallery_is_what_its_records_give() -> None:
    """Every trap is still named, in the words that are published."""
    folder = FOLDER / "traps"
    assert (folder / "README.md").read_text(encoding="utf-8") == page(folder)


@pytest.mark.exhaustive
def test_the_page_of_the_cuda_stub_is_what_its_records_and_counts_give() -> None:
    """Made only if the stub of NCCL counted the bytes that every record says."""
    folder = FOLDER / "gpu-stub"
    assert (folder / "README.md").read_text(encoding="utf-8") == stub_page(folder)


FEW = ("default", "explain-zero3-speed", "full-matrix")
"""One that ranks speeds, one that was asked for them, one that was not."""
FIGURES_OF_SPEED = ("tokens/s", "samples/s", "step ms", "Fastest", "fastest", "slowest")
ORDERS = (
    "is fastest", "are fastest", "fastest is", "faster than", "is slowest", "are slowest",
    "Pareto frontier of",
)  # fmt: skip


def report_text(comparison: Comparison, question: ReportFocus) -> str:
    """The report in markdown, its details included and its title, which asks, left out."""
    short, details = markdown_of(page_of(comparison, question))
    return short.partition("\n")[2] + details


@pytest.mark.parametrize("folder", first(FEW, PUBLISHED))
def test_a_report_states_no_speed_unless_it_was_asked_and_no_order_without_enough_runs(folder: str) -> None:
    report = FOLDER / folder / "report.md"
    question = read_manifest(report.read_text(encoding="utf-8"), report).manifest.question
    comparison = published_comparison(folder)
    excluded: tuple[str, ...] = ()
    if not speeds_are_asked(question):
        excluded = FIGURES_OF_SPEED
    elif not any(order.is_judged for order in comparison.comparable.rankings.values()):
        excluded = ORDERS
    text = report_text(comparison, question) if excluded else ""
    assert [words for words in excluded if words in text] == []


def test_repeats_that_the_page_calls_for_are_those_that_an_interval_needs() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"from {interval_runs()} rounds on" in page
    assert all(order.is_judged for order in published_comparison("default").comparable.rankings.values())


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
