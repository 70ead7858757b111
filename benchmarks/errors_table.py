"""The part of docs/planning.md that says how wrong predictions were, from the pages in reports/predictions.

Usage: python -m benchmarks.errors_table docs/planning.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.packed_page import between
from harness.plan.trust import ERRORS, OFFLOADED, SHORT_TOKENS

REPORTS = Path(__file__).resolve().parents[1] / "reports" / "predictions"
FULL, ADAPTED = "of these full training, fully specified (tier A)", "of these LoRA and QLoRA"
PUBLISHED = "[published GPU runs](../reports/predictions/published/README.md)"
LINKS = "[CPU ranks over links of known speed](../reports/predictions/step-times/README.md)"
FOOTNOTE = """\
Medians and means are of absolute errors. Speeds of published runs are by constants of other sources. Orders
are of two strategies that differ by over 5 %, with equal model, batch and GPUs; those of published runs are
means of the sources."""
BEGIN, END = "<!-- errors: python -m benchmarks.errors_table -->", "<!-- end of errors -->"
UNREAD = {"memory": ", their programs unread", "speed": ""}


def table() -> str:
    """Errors of each kind of prediction, and how often answers of yes or no were right."""
    published = _text("published/README.md")
    errors = ["predicted", "compared with", "cases", "median, %", "mean, %", "worst, %"]
    shares = ["right answers", "compared with", "right", "of", "%"]
    tables = (
        _aligned([*_errors_on_cpu(), *_errors_of_published(published)], errors),
        _aligned(_shares(published), shares),
    )
    return "\n\n".join([summary(published), *tables, FOOTNOTE])


def summary(published: str) -> str:
    """What a reader who plans needs of the table: four lines."""
    pattern = r"(?m)^- (memory|speed): .* for (\d+)% of (\d+) rows .* in (\d+)% of them .* median is (\d+)%"
    return "\n".join([
        *(
            f"- {name.capitalize()} of sources left out{UNREAD[name]}: an answer states ±{width} % in the "
            "middle, for "
            f"{stated} % of {rows} runs, and the truth lies within what it states in {within} % of these, "
            "by source."
            for name, stated, rows, within, width in re.findall(pattern, published)
        ),
        "- Steps on samples of under 1,024 tokens: sources lie far apart, and mostly no error is stated. "
        "Measure with [`harness fit`](#fit) first.",
        "- Model states and bytes sent, on CPU ranks under every backend that runs there: no error "
        "([memory](memory.md), [communication](communication.md)).",
    ])  # fmt: skip


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, table())


def _aligned(rows: Iterable[Sequence[str]], heads: Sequence[str]) -> str:
    """Two columns of words, the others of numbers."""
    aligned = ["left", "left", *["right"] * (len(heads) - 2)]
    return tabulate([*rows], heads, tablefmt="pipe", disable_numparse=True, colalign=aligned)


def _errors_on_cpu() -> Iterable[list[str]]:
    divided = "CPU ranks that divide the model or share samples"
    for name, where in (("cpu", "CPU ranks"), ("divided", divided)):
        count, mean, worst = _row(_text(f"{name}.md"), "all")[1:4]
        link = f"[{where}](../reports/predictions/{name}.md)"
        yield ["peak", link, count, "", mean.rstrip("%"), worst.rstrip("%")]
    cells = _steps()
    yield ["step time, after calibration", LINKS, cells["cells"], cells["median"], "", ""]


def _errors_of_published(page: str) -> Iterable[list[str]]:
    peaks = (
        (PUBLISHED, _row(page, "all rows")), ("full training, fully specified", _row(page, FULL)),
        ("LoRA and QLoRA", _row(page, ADAPTED)),
    )  # fmt: skip
    for name, row in peaks:
        yield ["peak", name, row[2], "", _whole(row[3]), _whole(row[4])]
    for name in ("allocated", "reserved", "device"):
        row = _row(page, "memory is", name)
        yield ["peak", f"published as {name} memory", row[2], "", _whole(row[4]), ""]
    for name, errors in _errors_of_speed().items():
        middle, worst = (f"{100 * share:.0f}" for share in (median(errors), max(errors)))
        yield ["speed", PUBLISHED if name == "all" else name, f"{len(errors)}", middle, "", worst]
    left = _row(_text("published/left-out.md"), "all")
    for name, error in (("constants of all other sources", left[8]), ("shipped constants", left[6])):
        where = "[A100, H100, H200, middle of sources](../reports/predictions/published/left-out.md)"
        yield [f"speed, {name}", where, left[2], _whole(error), "", ""]


def _shares(page: str) -> Iterable[list[str]]:
    covered, rows = _row(page, "all rows")[1].split(" of ")
    yield _share("a prediction is possible", PUBLISHED, covered, rows)
    right, of = _found(r"([\d.]+)% of (\d+)", _row(page, "all rows")[5]).groups()
    yield _share(
        "fits or not", "published runs whose source says it", f"{float(right) / 100 * int(of):.0f}", of
    )
    for name in ("speed", "memory"):
        pattern = rf"(?m)^- {name}: ([\d.]+)% right, mean of \d+ sources, (\d+) pairs"
        share, pairs = _found(pattern, page).groups()
        yield [f"order in {name}", "pairs of published runs", "", pairs, f"{float(share):.0f}"]
    cells = _steps()
    yield _share("step time within 10 %", LINKS, cells["within"], cells["cells"])
    yield _share("order in step time", "pairs of these cells", cells["right"], cells["pairs"])


def _share(question: str, where: str, right: str, of: str) -> list[str]:
    return [question, where, right, of, f"{100 * int(right) / int(of):.0f}"]


def _steps() -> dict[str, str]:
    """What the page on step times comes to, by name."""
    return _found(
        r"(?P<within>\d+) of (?P<cells>\d+) cells within 10%, median error (?P<median>[\d.]+)%; "
        r"order right in (?P<right>\d+) of (?P<pairs>\d+) pairs",
        _text("step-times/README.md"),
    ).groupdict()


def _errors_of_speed() -> dict[str, list[float]]:
    """By kind of training, absolute errors of the predictions that answers cite."""
    runs = [one for one in json.loads(ERRORS.read_text()) if one["speed"] is not None]
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda one: True,
        "full training": lambda one: not one["adapted"] and not one["kind"].endswith(OFFLOADED),
        "LoRA and QLoRA": lambda one: one["adapted"],
        "offload, with LoRA": lambda one: one["kind"].endswith(OFFLOADED),
        f"samples of under {SHORT_TOKENS:,} tokens": lambda one: one["tokens"] < SHORT_TOKENS,
    }
    return {name: [abs(one["speed"]) for one in runs if is_one(one)] for name, is_one in kinds.items()}


def _text(name: str) -> str:
    return (REPORTS / name).read_text(encoding="utf-8")


def _row(page: str, *first: str) -> list[str]:
    """Cells of the row of a table that begins with these."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines())
    return next(row for row in rows if tuple(row[: len(first)]) == first)


def _found(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found


def _whole(share: str) -> str:
    """'6' of '5.9%'."""
    return f"{float(share.rstrip('%')):.0f}"


def main() -> None:
    """Write the table into the page that the command names."""
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
