"""Loss over steps, and below it the difference to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backends.registry import REFERENCE
from harness.compare.rows import Row
from harness.record import Record
from harness.report.document import Picture
from harness.report.drawing import GREY, style
from harness.report.formats import ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_picture(rows: Sequence[Row]) -> Picture | None:
    """Curves of all runs; None without any loss."""
    drawn = [row for row in rows if any(step.loss is not None for step in row.record.steps)]
    if not drawn:
        return None
    return Picture(
        key="loss",
        caption="Loss over steps and difference to the reference",
        draw=lambda figure: _draw(figure, drawn),
        height_inches=6.4,
    )


def _draw(figure: Figure, drawn: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = _references(drawn)
    several_jobs = len({row.record.job_id for row in drawn}) > 1
    lines = []
    for index, row in enumerate(drawn):
        # Curves that agree lie on each other: the earlier ones are wider and stay visible.
        width = 4.0 - 3.0 * index / max(1, len(drawn) - 1)
        record = row.record
        label = f"{record.backend.label}, {ranks(record.world.world_size)}"
        if several_jobs:
            label += f", job {record.job_id[:6]}"
        steps = [(s.step, s.loss) for s in record.steps if s.loss is not None]
        lines += above.plot(*zip(*steps, strict=True), label=label, linewidth=width, **style(index))
        beside = reference.get(record.job_id)
        if beside is None or beside.run_id == record.run_id:
            continue
        differences = [
            (a.step, a.loss - b.loss)
            for a, b in zip(record.steps, beside.steps, strict=False)
            if a.loss is not None and b.loss is not None
        ]
        if differences:
            below.plot(*zip(*differences, strict=True), linewidth=width, **style(index))
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel("loss minus reference\n(nats per token)")
    below.set_xlabel("optimizer step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.axhline(0, color=GREY, linewidth=0.6)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axis in (above, below):
        axis.grid()
    figure.legend(handles=lines, loc="outside lower center", ncols=3)


def _references(rows: Sequence[Row]) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for row in rows:
        if row.record.backend.name == REFERENCE:
            found.setdefault(row.record.job_id, row.record)
    return found
