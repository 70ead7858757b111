"""Loss over steps, and below it the difference to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log10
from statistics import median
from typing import TYPE_CHECKING

from harness.compare.comparison import Comparison
from harness.compare.repeats import Repeats
from harness.report.document import Picture
from harness.report.drawing import GREY, style
from harness.report.formats import scientific
from harness.report.pictures.bars import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CURVES = 24
"""More could not be distinguished."""
Curve = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class _Line:
    group: Repeats
    losses: Curve
    differences: Curve
    """Empty for the reference, and without one."""


def loss_picture(comparison: Comparison) -> Picture | None:
    """Curves of all cells, medians over repeats; None without any loss."""
    groups = comparison.groups
    references = {group.record.job_id: _losses(group) for group in reversed(groups) if group.is_reference}
    lines = []
    for group in groups:
        losses = _losses(group)
        expected = {} if group.is_reference else references.get(group.record.job_id, {})
        if losses:
            differences = {step: loss - expected[step] for step, loss in losses.items() if step in expected}
            lines.append(_Line(group=group, losses=losses, differences=differences))
    if not lines:
        return None
    drawn = _furthest(lines)
    caption = (
        "Above: loss over steps, medians over repeats. Below: the difference to the reference of its job."
    )
    if len(drawn) < len(lines):
        caption += (
            f" Drawn are {len(drawn)} of {len(lines)}: the references and runs that diverged, then those "
            "furthest from them."
        )
    return Picture(
        key="loss",
        caption=caption,
        draw=lambda figure: _draw(figure, drawn),
        height_inches=5.6 + 0.17 * ((len(drawn) + 2) // 3),
    )


def _losses(group: Repeats) -> Curve:
    """Median loss of each step over the repeats that reached it with a finite loss."""
    found: dict[int, list[float]] = {}
    for row in group.rows:
        for step in row.record.steps:
            if step.loss is not None:
                found.setdefault(step.step, []).append(step.loss)
    return {step: median(losses) for step, losses in found.items()}


def _furthest(lines: Sequence[_Line]) -> list[_Line]:
    """At most `MOST_CURVES`, in their order."""

    def importance(line: _Line) -> float:
        if line.group.is_reference or line.group.parity == "diverged":
            return float("inf")
        return max((abs(value) for value in line.differences.values()), default=0.0)

    keep = {id(line) for line in sorted(lines, key=importance, reverse=True)[:MOST_CURVES]}
    return [line for line in lines if id(line) in keep]


def _draw(figure: Figure, lines: Sequence[_Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    differ = any(line.differences for line in lines)
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)) if differ else [figure.subplots()]
    groups = [line.group for line in lines]
    for index, line in enumerate(lines):
        # Curves that agree lie on each other: the earlier ones are wider and stay visible.
        width = 4.0 - 3.0 * index / max(1, len(lines) - 1)
        name = label(line.group, groups)
        axes[0].plot(*_sorted(line.losses), label=name, linewidth=width, **style(index))
        if line.differences:
            axes[1].plot(*_sorted(line.differences), linewidth=width, **style(index))
    axes[0].set_ylabel("loss (nats per token)")
    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if differ:
        axes[1].set_ylabel("loss minus reference\n(nats per token)")
        axes[1].axhline(0, color=GREY, linewidth=0.6)
        _scale(axes[1], lines)
    for axis in axes:
        axis.grid()
    figure.legend(loc="outside lower center", ncols=3, title="backend, ranks", title_fontsize=8)


def _scale(axis: Axes, lines: Sequence[_Line]) -> None:
    """Linear while all agree; else linear within rounding, shaded, and logarithmic beyond."""
    from matplotlib.ticker import FuncFormatter

    limits = [row.noise.tight.loss for line in lines for row in line.group.rows if row.noise is not None]
    limit = min(limits, default=0.0)
    largest = max((abs(v) for line in lines for v in line.differences.values()), default=0.0)
    if largest <= limit or not limit:
        axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        return
    axis.set_yscale("symlog", linthresh=10.0 ** ceil(log10(limit)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scientific(value)))
    axis.axhspan(-limit, limit, color=GREY, alpha=0.15, linewidth=0)


def _sorted(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]
