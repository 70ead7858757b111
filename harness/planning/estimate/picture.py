"""An estimate as a picture: memory, speed and exposed communication over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.atomic_write import write_atomically
from harness.errors import HarnessError
from harness.planning.estimate.question import Question
from harness.planning.estimate.row import EstimateRow, estimate
from harness.report.document import Picture
from harness.report.drawing import GREY, MARKERS, draw, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".svg": "svg", ".png": "png"}
LEGEND_COLUMNS = 4
LONGEST_NAME = 44


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Strategies with equal figures, over the number of ranks."""

    name: str
    rows: tuple[EstimateRow, ...]


def picture_format(path: Path) -> str:
    """'svg' or 'png' by the file's suffix. Raises HarnessError for another."""
    if path.suffix not in FORMATS:
        raise HarnessError(f"--plot was given '{path}'; give a name that ends with .svg or .png")
    return FORMATS[path.suffix]


def sizes_to_draw(asked: Question) -> Question:
    """The question over several numbers of ranks; of a single one, over powers of two up to it."""
    if len(asked.world_sizes) > 1:
        return asked
    (largest,) = asked.world_sizes
    per_node = asked.ranks_per_node
    powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    fitting = [size for size in powers if size <= per_node or size % per_node == 0]
    return replace(asked, world_sizes=(*fitting, largest))


def write_picture(asked: Question, path: Path) -> None:
    """Write the picture as SVG or PNG, by the file's suffix. Raises HarnessError where it cannot."""
    form = picture_format(path)
    several = sizes_to_draw(asked)
    image = draw(estimate_picture(several, estimate(several)), (form,))[form]
    try:
        write_atomically(path, image)
    except OSError as error:
        raise HarnessError(f"--plot {path} cannot be written: {error.strerror}") from error


def estimate_picture(asked: Question, rows: Sequence[EstimateRow]) -> Picture:
    """Memory with the device's limit, and where a device is known, tokens/s and exposed communication."""
    curves = curves_of(rows)
    timed = any(row.speed is not None for row in rows)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, 3) if timed else [figure.subplots()]
        _memory(panels[0], asked, curves)
        if timed:
            _panel(panels[1], curves, "tokens/s per GPU", _tokens)
            _panel(panels[2], curves, "exposed communication, % of the step", _exposed)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS if timed else 2)

    lines = -(-(len(curves) + 1) // (LEGEND_COLUMNS if timed else 2))
    return Picture(
        key="estimate",
        caption=f"Predicted memory and speed of {asked.model.name} by strategy over the number of ranks.",
        draw=paint,
        width_inches=13.0 if timed else 7.0,
        height_inches=4.0 + 0.19 * lines,
    )


def curves_of(rows: Sequence[EstimateRow]) -> list[Curve]:
    """One for all strategies whose figures are the same at every number of ranks."""
    by_label: dict[str, list[EstimateRow]] = {}
    for row in rows:
        if row.memory is not None:
            by_label.setdefault(row.label, []).append(row)
    merged: dict[tuple[Any, ...], list[str]] = {}
    for label, found in by_label.items():
        figures = tuple((row.world_size, _needed(row), _tokens(row), _exposed(row)) for row in found)
        merged.setdefault(figures, []).append(label)
    return [Curve(name=_joined(labels), rows=tuple(by_label[labels[0]])) for labels in merged.values()]


def _joined(labels: Sequence[str]) -> str:
    text = ", ".join(labels)
    return text if len(text) <= LONGEST_NAME else f"{labels[0]} and {len(labels) - 1} equal ones"


def _memory(axis: Axes, asked: Question, curves: Sequence[Curve]) -> None:
    _panel(axis, curves, "GB of memory per rank", _needed)
    axis.set_yscale("log")
    if asked.device is not None:
        limit = asked.device.memory_bytes / 1e9
        name = f"{asked.device.name}: {limit:.1f} GB"
        axis.axhline(limit, color=GREY, linewidth=1.8, linestyle=(0, (1, 1)), label=name)
    _plain(axis.yaxis)


def _panel(
    axis: Axes, curves: Sequence[Curve], title: str, read: Callable[[EstimateRow], float | None]
) -> None:
    for index, curve in enumerate(curves):
        points = [(row.world_size, value) for row in curve.rows if (value := read(row)) is not None]
        if points:
            across, up = zip(*points, strict=True)
            axis.plot(
                across, up, label=curve.name, marker=MARKERS[index % len(MARKERS)], markersize=4,
                linewidth=1.2, **style(index),
            )  # fmt: skip
    sizes = sorted({row.world_size for curve in curves for row in curve.rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, labels=[f"{size:,}" for size in sizes], rotation=45 if len(sizes) > 7 else 0)
    axis.minorticks_off()
    axis.set_xlabel("ranks")
    axis.set_title(title)
    axis.grid(True)


def _plain(axis: Any) -> None:
    """Pictures do not read mathematics, which logarithmic axes write by themselves."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _needed(row: EstimateRow) -> float | None:
    return None if row.memory is None else row.memory.device_bytes / 1e9


def _tokens(row: EstimateRow) -> float | None:
    return None if row.speed is None else row.speed.tokens_per_second_per_gpu


def _exposed(row: EstimateRow) -> float | None:
    return None if row.speed is None else 100 * row.speed.exposed_seconds / row.speed.step_seconds
