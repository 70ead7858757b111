"""What pictures with one bar for each backend and world size share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.compare.repeats import Repeats, place_to_compare
from harness.report.drawing import COLOURS, GREY, HATCHES
from harness.report.formats import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 24
"""More would make the picture longer than a screen; then only one world size is drawn."""
LONGEST_LABEL = 34
INCHES_PER_BAR = 0.27


def drawable(groups: Sequence[Repeats]) -> list[Repeats]:
    """Those that get a bar: all, or the first of the world size at which the verdict compares."""
    if len(groups) <= MOST_BARS:
        return list(groups)
    place = place_to_compare(groups)
    size = place[1] if place else max(group.world_size for group in groups)
    return [group for group in groups if group.world_size == size][:MOST_BARS]


def caption(text: str, drawn: Sequence[Repeats], groups: Sequence[Repeats]) -> str:
    """The text, and what of the groups is not drawn."""
    if len(drawn) == len(groups):
        return text
    sizes = sorted({group.world_size for group in drawn})
    return f"{text} Drawn are {len(drawn)} of {len(groups)}, on {sizes[-1]} ranks; the tables hold all."


def label(group: Repeats, groups: Sequence[Repeats]) -> str:
    """Short name of a bar or curve; it names the job where there are several."""
    name = f"{shortened(group.label, LONGEST_LABEL)}, {group.world_size}"
    several = len({other.record.job_id for other in groups}) > 1
    return f"{name}, job {group.record.job_id[:6]}" if several else name


def height_inches(count: int) -> float:
    """Of a picture with so many bars, axis and legend included."""
    return 1.5 + INCHES_PER_BAR * count


def present(order: Sequence[str], parts: Sequence[Mapping[str, float]]) -> list[str]:
    """The names that any of the bars has a part of, in that order."""
    return [name for name in order if any(name in of_bar for of_bar in parts)]


def stacked(
    axis: Axes,
    places: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    names: Sequence[str],
    *,
    height: float = 0.72,
    legend: bool = True,
) -> None:
    """Horizontal bars at these places, each cut into the named parts in that order."""
    left = [0.0] * len(parts)
    for index, name in enumerate(names):
        widths = [of_bar.get(name, 0.0) for of_bar in parts]
        axis.barh(
            places, widths, left=left, label=name if legend else None, height=height,
            color=COLOURS[index % len(COLOURS)], hatch=HATCHES[index // len(COLOURS) % len(HATCHES)],
            edgecolor=GREY, linewidth=0.3,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]


def label_bars(axis: Axes, groups: Sequence[Repeats], unit: str) -> None:
    """Names next to the bars, first on top, and the unit below; call it when all is drawn."""
    axis.set_yticks(range(len(groups)), [label(group, groups) for group in groups])
    axis.set_ylabel("backend, ranks")
    axis.set_xlabel(unit)
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.grid(axis="x")


def legend_below(figure: Figure, columns: int = 5) -> None:
    """One legend below the picture."""
    from matplotlib.container import BarContainer

    handles, labels = figure.axes[0].get_legend_handles_labels()
    entries = sorted(
        zip(handles, labels, strict=True), key=lambda entry: not isinstance(entry[0], BarContainer)
    )
    figure.legend(
        [handle for handle, _ in entries], [name for _, name in entries],
        loc="outside lower center", ncols=columns,
    )  # fmt: skip
