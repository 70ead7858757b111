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
BEGIN, END = "<!-- errors: python -m benchmarks.errors_table -->", "<!-- end of errors -->"


def table() -> str:
    """A row for each kind of prediction: what it was held against, and by how much it was off."""
    published = _text("published/README.md")
    heads = ["prediction", "held against", "error"]
    rows = [*_of_cpu(), *_of_published(published)]
    return f"{summary(published)}\n\n{tabulate(rows, heads, tablefmt='pipe', disable_numparse=True)}"


def summary(published: str) -> str:
    """What a reader who plans needs of the table: three lines."""
    full, adapted = (_row(published, name) for name in (FULL, ADAPTED))
    speeds = _errors_of_speed()
    speed, adapted_speed = (_median_and_worst(speeds[name]) for name in ("full training", "LoRA and QLoRA"))
    worst = _whole(full[4])
    return "\n".join([
        f"- Memory of full training whose settings are all known: mean {_whole(full[3])}, worst {worst}; "
        f"leave {worst} of the GPU free.",
        f"- Speed of full training: {speed}.",
        f"- LoRA and QLoRA: memory mean {_whole(adapted[3])}, worst {_whole(adapted[4])}; speed "
        f"{adapted_speed}. Measure with [`harness fit`](#fit) first.",
    ])  # fmt: skip


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, table())


def _of_cpu() -> Iterable[list[str]]:
    backends = "every backend that runs there ([memory](memory.md), [communication](communication.md))"
    yield ["model states, bytes sent", f"CPU ranks, {backends}", "none"]
    divided = "CPU ranks that divide the model or share samples"
    for name, where in (("cpu", "CPU ranks"), ("divided", divided)):
        count, mean, worst = _row(_text(f"{name}.md"), "all")[1:4]
        link = f"[{count} configurations](../reports/predictions/{name}.md)"
        yield ["peak", f"{where}, {link}", f"mean {_spaced(mean)}, worst {_spaced(worst)}"]
    cells = _found(
        r"(\d+ of \d+) cells within 10%, median error ([\d.]+%); order right in (\d+ of \d+) pairs",
        _text("step-times/README.md"),
    )
    links = "[CPU ranks over links of known speed](../reports/predictions/step-times/README.md)"
    error = f"median {_spaced(cells[2])}, {cells[1]} cells within 10 %, {cells[3]} orders right"
    yield ["step time, after calibration", links, error]


def _of_published(page: str) -> Iterable[list[str]]:
    everything, full, adapted = (_row(page, name) for name in ("all rows", FULL, ADAPTED))
    covered, rows = everything[1].split(" of ")
    share = f"{int(covered) / int(rows):.0%}".replace("%", " %")
    yield [
        "peak",
        f"[{rows} published GPU runs](../reports/predictions/published/README.md), of which {covered} can be "
        f"predicted ({share})",
        "; ".join(
            f"{name}: mean {_whole(row[3])}, worst {_whole(row[4])}"
            for name, row in (
                ("all", everything), ("full training that is fully specified", full),
                ("LoRA and QLoRA", adapted),
            )
        ) + "; mean of " + ", ".join(
            f"{name} {_whole(_row(page, 'memory is', name)[4])}"
            for name in ("allocated", "reserved", "device")
        ),
    ]  # fmt: skip
    right, of = _found(r"([\d.]+)% of (\d+)", everything[5]).groups()
    yield [
        "what fits", "the same, where the source says it",
        f"right for {float(right) / 100 * int(of):.0f} of {of}",
    ]  # fmt: skip
    yield ["speed", "the same, where no constant was estimated from a run", _speeds()]
    left = _row(_text("published/left-out.md"), "all")
    yield [
        "speed, constants of all other sources",
        f"[{left[2]} runs of full training](../reports/predictions/published/left-out.md) on A100, H100 and "
        "H200",
        f"median {_whole(left[7])}, {_whole(left[5])} with the shipped constants",
    ]
    orders = dict(re.findall(r"^- (speed|memory): ([\d.]+)% right", page, re.MULTILINE))
    yield [
        "order of two strategies that differ by over 5 %",
        "the same, equal model, batch and GPUs",
        f"right for {float(orders['speed']):.0f} % of the pairs in speed, {float(orders['memory']):.0f} % in "
        "memory, mean of the sources",
    ]


def _speeds() -> str:
    """Medians of the errors that answers cite."""
    return "; ".join(
        f"{name}: {_median_and_worst(errors)} ({len(errors)} runs)"
        for name, errors in _errors_of_speed().items()
    )


def _median_and_worst(errors: Sequence[float]) -> str:
    return f"median {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %"


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


def _spaced(share: str) -> str:
    return share.replace("%", " %")


def _whole(share: str) -> str:
    """'6 %' of '5.9%'."""
    return f"{float(share.rstrip('%')):.0f} %"


def main() -> None:
    """Write the table into the page that the command names."""
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
