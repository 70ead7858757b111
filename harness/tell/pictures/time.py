"""Where the time of a step goes: by phase, and by computing and communicating."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from harness.judge import speed
from harness.judge.comparison import Comparison
from harness.judge.quantities.timings import DATA, WAITING
from harness.judge.repeats import CellRuns
from harness.record import RankPart
from harness.tell.document import Picture
from harness.tell.formats import number, percent
from harness.tell.pictures.bars import (
    bar_chart,
    caption,
    cell_row,
    drawable,
    rows_of_all,
    stack,
    text_after,
    told,
)
from harness.tell.pictures.drawing import (
    ACTIVITIES,
    COPIES_ALONE,
    DEVICE_ACTIVITIES,
    EXPOSED,
    FAINT,
    PHASES,
    Row,
    only_drawn,
)

PARTS = {DATA: "data", "forward": "forward", "backward": "backward", "step": "clipping and update"}
STAGES = "waiting for other stages"
Parts = Mapping[str, float]
PartsOf = Callable[[CellRuns], Parts]
TITLE = "time of a step, ms"


def phases_picture(comparison: Comparison) -> Picture | None:
    """Timed steps by phase; None where no phase was timed."""
    text = (
        "Time of a timed step by phase: medians of each cell, each on the rank where it is largest. Waiting "
        "for other ranks counts in the phase in which it happens."
    )
    if any(order.rounds > 1 for order in comparison.rankings.values()):
        text = f"{text} Ratios of speed in tables are by round, so ratios of these medians may differ."
    colours = PHASES
    if any(WAITING in rank.phase_seconds for group in comparison.groups for rank in group.record.ranks):
        colours = {**PHASES, STAGES: FAINT}
        text = f"{text} For pipelines it is shown separately, for the rank that waits least for other stages."
    return _picture("time", text, comparison, lambda rank: rank.phase_seconds, _phases, colours, "forward")


def overlap_picture(comparison: Comparison) -> Picture | None:
    """Traced steps by computing and communicating; None where none was traced."""
    text = (
        "Time of the traced step of median duration, of all ranks and runs. Exposed: communication during "
        "which nothing computes. Tracing makes a step longer."
    )
    parts = [p for group in comparison.groups for rank in group.record.ranks for p in rank.overlap]
    colours = DEVICE_ACTIVITIES if any(part.copy_seconds for part in parts) else ACTIVITIES
    return _picture("overlap", text, comparison, lambda rank: rank.overlap, _overlap, colours, EXPOSED)


def _picture(
    key: str,
    text: str,
    comparison: Comparison,
    has: Callable[[RankPart], object],
    parts_of: PartsOf,
    colours: Mapping[str, str],
    telling: str,
) -> Picture | None:
    known = [g for g in comparison.groups if g.step_seconds and any(has(r) for r in g.record.ranks)]
    drawn = drawable(known)
    if not drawn:
        return None

    def rows_of(group: CellRuns) -> list[Row]:
        parts = parts_of(group)
        total = sum(parts.values())
        rows = []
        for index, (name, time) in enumerate(parts.items()):
            # What belongs to the cell stands in the row of its first part.
            told_part = f"{number(total)} ms, {percent(parts.get(telling, 0.0) / total)} {telling}"
            of_cell = {"total": total, "text": f"{number(total)} ms", "told": told_part}
            rows.append(
                cell_row(
                    group,
                    known,
                    part=name,
                    milliseconds=time,
                    order=list(colours).index(name),
                    **(of_cell if index == 0 else dict.fromkeys(of_cell)),
                )
            )
        return rows

    every = rows_of_all(known, drawn, rows_of)
    firsts = [row for row in only_drawn(every) if row["total"] is not None]
    layers = [stack("milliseconds", TITLE, "part", colours), text_after("total")]
    return Picture(
        key=key,
        caption=caption(text, drawn, known),
        alt=f"Stacked bars of {TITLE}. {told(firsts, 'told')}.",
        chart=lambda: bar_chart(every, layers),
    )


def _phases(group: CellRuns) -> Parts:
    found: dict[str, float] = {}
    for part, name in PARTS.items():
        _add(found, name, [row.run.largest_median(part) for row in group.rows])
    _add(found, STAGES, [row.run.least_median(WAITING) for row in group.rows])
    return found


def _add(parts: dict[str, float], name: str, seconds: Sequence[float | None]) -> None:
    """The median of those that are known, in milliseconds."""
    known = [value for value in seconds if value is not None]
    if known:
        parts[name] = median(known) * 1e3


def _overlap(group: CellRuns) -> Parts:
    parts = [part for row in group.rows for rank in row.record.ranks for part in rank.overlap]
    if not parts:
        return {}
    middle = speed.median_step(parts)
    times = (middle.compute_seconds, middle.exposed_seconds, middle.idle_seconds)
    found = {name: seconds * 1e3 for name, seconds in zip(ACTIVITIES, times, strict=True)}
    if middle.copy_seconds:
        found[COPIES_ALONE] = max(0.0, (middle.seconds - sum(times)) * 1e3)
    return found
