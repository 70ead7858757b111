"""Loss over steps, and below it the difference to the reference: cells that agree as a band, others named."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.comparison import Comparison
from harness.judge.wording import counted, listed
from harness.report.document import Picture
from harness.report.formats import number, scientific
from harness.report.pictures.cells import MOST_NAMED
from harness.report.pictures.loss_chart import loss_chart
from harness.report.pictures.loss_lines import Line, loss_lines

MOST_OUTLIERS = 8
MOST_JOBS = 4
"""Each has a panel of its own."""


def loss_picture(comparison: Comparison) -> Picture | None:
    """A band of the cells that agree, and each that does not; None without any loss."""
    lines = loss_lines(comparison)
    if not lines:
        return None
    drawn = _drawn(lines)
    limits = sorted({line.limit for line in lines if line.limit is not None and line.differences})
    outliers = [line for line in lines if line.verdict == "diverged"]
    agreeing = [line for line in lines if line.verdict == "agrees"]
    text = "Loss over steps, medians over runs; the band spans all cells that agree."
    if any(line.differences for line in lines):
        text += " Below: difference to the reference"
        text += f", limit {listed([scientific(limit) for limit in limits])}." if limits else "."
    if len(drawn) < len(lines):
        text += f" Drawn: {len(drawn)} of {len(lines)} cells, those furthest from their reference first."
    return Picture(
        key="loss",
        caption=text,
        alt=_alt(lines, agreeing, outliers),
        chart=lambda: loss_chart(drawn),
    )


def _drawn(lines: Sequence[Line]) -> list[Line]:
    """Those of the first jobs, and of what diverged the furthest, in their order."""
    jobs = list(dict.fromkeys(line.group.record.job_id for line in lines))[:MOST_JOBS]
    of_jobs = [line for line in lines if line.group.record.job_id in jobs]
    outliers = [line for line in of_jobs if line.verdict == "diverged"]
    outliers.sort(key=lambda line: -line.largest)
    left_out = {id(line) for line in outliers[MOST_OUTLIERS:]}
    return [line for line in of_jobs if id(line) not in left_out]


def _alt(lines: Sequence[Line], agreeing: Sequence[Line], outliers: Sequence[Line]) -> str:
    first, last = (pick(lines[0].losses) for pick in (min, max))
    parts = [
        f"Loss over steps {first} to {last}: {number(lines[0].losses[first])} to "
        f"{number(lines[0].losses[last])} nats per token for {lines[0].group.label}."
    ]
    if agreeing:
        largest = max(line.largest for line in agreeing)
        parts.append(
            f"{counted(len(agreeing), 'cell')} within the limit, at most {scientific(largest)} from "
            "the reference."
        )
    if outliers:
        named = [f"{line.group.cell} ({scientific(line.largest)})" for line in outliers]
        parts.append(f"Diverged, with the largest difference of their loss: {listed(named, MOST_NAMED)}.")
    return " ".join(parts)
