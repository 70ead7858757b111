"""Where the time of a step goes: by phase, and by computing and communicating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from harness.compare import speed
from harness.compare.comparison import Comparison
from harness.compare.repeats import Repeats
from harness.compare.timings import DATA
from harness.record import RankPart
from harness.report.document import Picture
from harness.report.pictures.bars import (
    caption,
    drawable,
    height_inches,
    label_bars,
    legend_below,
    present,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Parts = Mapping[str, float]
PARTS = {DATA: "data", "forward": "forward", "backward": "backward", "step": "clipping and update"}
ACTIVITIES = ("computing", "exposed communication", "idle")
PartsOf = Callable[[Repeats], Parts]


def phases_picture(comparison: Comparison) -> Picture | None:
    """Timed steps by phase; None where no phase was timed."""
    text = (
        "Time of a timed step by phase, medians, each on the rank where it is largest; waiting for other "
        "ranks is part of the phase in which it happens."
    )
    return _picture("time", text, comparison, lambda rank: rank.phase_seconds, _phases)


def overlap_picture(comparison: Comparison) -> Picture | None:
    """Traced steps by computing and communicating; None where none was traced."""
    text = (
        "Time of a traced step by what a rank does: computing, exposed communication (nothing computes "
        "at the same time) and idle (neither). Each bar: the traced step of median duration, of all ranks "
        "and repeats. Tracing makes a step longer."
    )
    return _picture("overlap", text, comparison, lambda rank: rank.overlap, _overlap)


def _picture(
    key: str, text: str, comparison: Comparison, has: Callable[[RankPart], object], parts_of: PartsOf
) -> Picture | None:
    known = [g for g in comparison.groups if g.step_seconds and any(has(r) for r in g.record.ranks)]
    drawn = drawable(known)
    if not drawn:
        return None
    cut = [parts_of(group) for group in drawn]

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        stacked(axis, range(len(drawn)), cut, present((*PARTS.values(), *ACTIVITIES), cut))
        label_bars(axis, drawn, "time of a step (ms)")
        legend_below(figure)

    return Picture(
        key=key, caption=caption(text, drawn, known), draw=draw, height_inches=height_inches(len(drawn))
    )


def _phases(group: Repeats) -> Parts:
    found: dict[str, float] = {}
    for part, name in PARTS.items():
        times = [row.run.largest_median(part) for row in group.rows]
        known = [seconds for seconds in times if seconds is not None]
        if known:
            found[name] = median(known) * 1e3
    return found


def _overlap(group: Repeats) -> Parts:
    parts = [part for row in group.rows for rank in row.record.ranks for part in rank.overlap]
    if not parts:
        return {}
    middle = speed.median_step(parts)
    times = (middle.compute_seconds, middle.exposed_seconds, middle.idle_seconds)
    return {name: seconds * 1e3 for name, seconds in zip(ACTIVITIES, times, strict=True)}
