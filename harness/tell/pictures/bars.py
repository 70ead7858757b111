"""Pictures of horizontal bars, one for each cell, in a panel for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from harness.forms.terms import STATE_KINDS
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.facts import EXPECTED_SENT, SENT, TEXTBOOK_SENT
from harness.judge.quantities import DATA, WAITING, largest, rank_states
from harness.judge.rows import CellRuns, place_to_compare
from harness.judge.statistics import median_known
from harness.judge.wording import ranks
from harness.record import RankPart
from harness.record.workload import known_strategy
from harness.tell.document import Picture
from harness.tell.formats import number, one_line, percent, short, shortened
from harness.tell.pictures.drawing import (
    ACTIVITIES,
    COPIES_ALONE,
    DEVICE_ACTIVITIES,
    EXPOSED,
    FAINT,
    GREY,
    KINDS,
    LIMIT,
    PHASES,
    Row,
    channel,
    layer,
    look_of,
    only_drawn,
)
from harness.tell.tables import prose

MOST_CELLS = 24
"""More would make the picture longer than a screen; then only one world size is drawn."""
MOST_NAMED = 12
MOST_TOLD = 6
"""Cells in an alternative text."""
LONGEST_LABEL = 34
FARTHEST = 4.0
"""Times the median; what lies beyond it is cut, since it would press the others together."""
ROOM = 1.15
"""What is cut is drawn further out than the largest other one by this factor."""


def cell_row(group: CellRuns, groups: Sequence[CellRuns], **fields: Any) -> Row:
    """A row about a cell, which a page can filter by; `groups`: all that are drawn."""
    record = group.record
    return {
        "cell": one_line(group.cell.key),
        "backend": one_line(group.label),
        "ranks": group.world_size,
        "nodes": record.world.nodes,
        "precision": record.job.training.precision,
        "name": drawn_name(group.backend, [one.backend for one in groups]),
        "place": place_name(group, groups),
        **look_of(known_strategy(record)),
        **fields,
    }


def drawn_name(name: str, names: Sequence[str]) -> str:
    """A name without its middle where it is long, unless another of the names then looks the same."""
    short = shortened(name, LONGEST_LABEL)
    alike = any(other != name and shortened(other, LONGEST_LABEL) == short for other in names)
    return one_line(name) if alike else short


def rows_of_all(
    groups: Sequence[CellRuns], drawn: Sequence[CellRuns], rows_of: Callable[[CellRuns], Sequence[Row]]
) -> list[Row]:
    """Rows of every cell; `is_drawn` is False in those of cells that only a filter of a page may show."""
    return [
        row if any(group is one for one in drawn) else {**row, "is_drawn": False}
        for group in groups
        for row in rows_of(group)
    ]


def place_name(group: CellRuns, groups: Sequence[CellRuns]) -> str:
    """'2 ranks': where a cell is compared with others; run conditions and the job where they tell apart."""
    job_id, size, conditions = group.place
    several = len({other.record.job_id for other in groups if other.world_size == size}) > 1
    return ", ".join(filter(None, [ranks(size), conditions, f"job {job_id[:6]}" if several else ""]))


def cut_at(values: Sequence[float]) -> float | None:
    """Where an axis is cut; None: no value is far beyond the others."""
    most = FARTHEST * median(values)
    if max(values) <= most:
        return None
    return ROOM * max(value for value in values if value <= most)


def drawable(groups: Sequence[CellRuns]) -> list[CellRuns]:
    """Those that are drawn: all, or the first of the world size at which the verdict compares."""
    if len(groups) <= MOST_CELLS:
        return list(groups)
    place = place_to_compare(groups)
    size = place[1] if place else max(group.world_size for group in groups)
    return [group for group in groups if group.world_size == size][:MOST_CELLS]


def caption(text: str, drawn: Sequence[CellRuns], groups: Sequence[CellRuns]) -> str:
    """The text, and what of the groups is not drawn."""
    if len(drawn) == len(groups):
        return text
    sizes = sorted({group.world_size for group in drawn})
    return f"{text} Drawn: {len(drawn)} of {len(groups)} cells, on {ranks(*sizes)}."


def told(rows: Sequence[Row], text: str = "text") -> str:
    """'2 ranks: ddp 100 %, zero3 31 %; 4 ranks: ...', for an alternative text; long lists are cut."""
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(row["place"], []).append(f"{row['name']} {row[text]}")
    most = max(2, MOST_TOLD // max(1, len(places)))
    last = max(1, most // 3)
    for cells in places.values():
        if len(cells) > most:
            cells[most - last : -last] = ["..."]
    return "; ".join(f"{place}: {', '.join(cells)}" for place, cells in places.items())


Layer = dict[str, Any]
WIDTH = 520
"""Pixels of a panel, without the names to its left."""
STEP = 24
"""Pixels of a bar with the gap to the next."""


def bar_chart(rows: Sequence[Row], layers: Sequence[Layer]) -> dict[str, Any]:
    """Panels under each other; rows carry `place` and `name` and are drawn in their order."""
    return layer("bar_chart", rows=list(rows), width=WIDTH, step=STEP, layers=list(layers))


def bar(field: str, title: str) -> Layer:
    """One bar from zero, in the colour of its family."""
    return layer("bar", x=quantity(field, title=title))


def stack(field: str, title: str, by: str, colours: Mapping[str, str]) -> Layer:
    """Bars cut into parts: a row each, with `field`, the name under `by` and the place under `order`."""
    x = {**quantity(field, title=title), "stack": "zero"}
    return layer("stack", x=x, by=by, names=list(colours), colours=list(colours.values()))


def interval(low: str, high: str) -> Layer:
    """A line between two fields, over the bar."""
    return layer("interval", x=quantity(low), low=low, high=high)


def text_after(field: str) -> Layer:
    """Text to the right of a place."""
    return layer("text_after", x=quantity(field))


def tick(field: str, *, colour: str = GREY) -> Layer:
    """A vertical mark that is higher than the bar."""
    return layer("tick", x=quantity(field), field=field, size=STEP - 2, colour=colour)


def quantity(field: str, **title: str) -> Layer:
    """A channel from zero."""
    return channel(field, scale={"zero": True}, axis={"tickCount": 6}, **title)


REST = "activations"
LABELS = {**{kind: kind for kind in STATE_KINDS}, REST: "rest of the peak"}
FARTHEST_LIMIT = 4.0
"""Times the largest peak; a limit beyond it is told, since its line would make the bars short."""
MEMORY_TITLE = "peak memory of a rank, MB"


def memory_picture(comparison: Comparison) -> Picture | None:
    """None where no peak was measured."""
    known = [group for group in comparison.groups if group.rank_peaks]
    drawn = drawable(known)
    if not drawn:
        return None
    peaks = [_peak(group) for group in drawn]
    limit = min((limit for group in drawn if (limit := _limit(group)) is not None), default=None)
    near = limit is not None and limit <= FARTHEST_LIMIT * max(peaks)
    cut = cut_at(peaks)
    every = rows_of_all(known, drawn, lambda group: _parts(group, known, near, cut))
    rows = only_drawn(every)
    ends = [row for row in rows if row["kind"] == LABELS[REST]]
    text = prose("memory_picture")
    if any(row["expected"] is not None for row in ends):
        text += " Vertical marks: model states expected in closed form."
    if limit is not None:
        text += f" Device limit: {number(limit)} MB."
    if cut is not None:
        text += f" Bars are cut at {number(cut)} MB."
    return Picture(
        key="memory",
        caption=caption(text, drawn, known),
        alt=f"Bars: {MEMORY_TITLE}, and model states. {told(ends)}.",
        chart=lambda: _chart(every, limit if near else None),
    )


def _peak(group: CellRuns) -> float:
    """In MB, as all figures of a bar."""
    return max(group.rank_peaks) / 1e6


def _limit(group: CellRuns) -> float | None:
    record = group.record
    predicted = record.prediction.device_limit_bytes if record.prediction else None
    limit = record.world.memory_limit_bytes or predicted
    return None if limit is None else limit / 1e6


def _parts(group: CellRuns, groups: Sequence[CellRuns], near: bool, cut: float | None) -> list[Row]:
    """A row for each kind; the last, which is always there, holds what belongs to the cell."""
    kinds, peak = quantities.kinds_at(group.record, "after_backward"), _peak(group)
    states = {kind: kinds[kind] / 1e6 for kind in STATE_KINDS if kinds.get(kind)}
    held, end = sum(states.values()), peak if cut is None else min(peak, cut)
    text = f"{number(peak)} MB" + (f", states {number(held)}" if states else "")
    of_cell = {
        "peak": peak,
        "end": end,
        "expected": _expected(group),
        "limit": _limit(group) if near else None,
        "text": text + (" (bar cut)" if end < peak else ""),
    }
    return [
        cell_row(
            group, groups, kind=LABELS[kind], megabytes=size, order=list(KINDS).index(kind),
            **(of_cell if kind == REST else dict.fromkeys(of_cell)),
        )
        for kind, size in {**states, REST: max(0.0, end - held)}.items()
    ]  # fmt: skip


def _expected(group: CellRuns) -> float | None:
    """Closed form of the model states on the device, of the rank that holds most."""
    states = largest(rank_states(group.record))
    if states is None or states.expected is None:
        return None
    kinds = states.expected.kinds(host=False)
    return sum(kinds.get(kind, 0) for kind in STATE_KINDS) / 1e6


def _chart(rows: Sequence[Row], limit: float | None) -> dict[str, Any]:
    used = {row["kind"] for row in rows}
    colours = {LABELS[kind]: colour for kind, colour in KINDS.items() if LABELS[kind] in used}
    layers = [stack("megabytes", MEMORY_TITLE, "kind", colours), tick("expected"), text_after("end")]
    if limit is not None:
        at = {**quantity("limit"), "aggregate": "min"}
        layers += layer("device_limit", x=at, text=f"device limit {number(limit)} MB")
    return bar_chart(rows, layers)


NEGLIGIBLE = 0.005
"""Relative difference below which two volumes are written as equal."""


def volume_picture(comparison: Comparison) -> Picture | None:
    """None where nobody sent anything."""
    known = [group for group in comparison.groups if group.median(SENT)]
    drawn = drawable(known)
    if not drawn:
        return None
    every = rows_of_all(known, drawn, lambda group: [_row(group, known)])
    rows = only_drawn(every)
    title = "sent by a rank per step, MB (ring algorithm)"
    layers = [bar("megabytes", title), tick("textbook"), tick("unexpected", colour=LIMIT), text_after("end")]
    return Picture(
        key="communication",
        caption=caption(f"Bytes that a rank sends per step. {_ticks(rows)}", drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(every, layers),
    )


def _row(group: CellRuns, groups: Sequence[CellRuns]) -> Row:
    sent = group.median(SENT) or 0.0
    textbook, expected = group.median(TEXTBOOK_SENT), group.median(EXPECTED_SENT)
    text = f"{number(sent / 1e6)} MB"
    if textbook and not _equal(sent, textbook):
        text += f" = {short(round(sent / textbook, 2))} x textbook"
    unexpected = expected is not None and not _equal(sent, expected)
    if expected is not None and unexpected:
        text += f", {number(expected / 1e6)} expected"
    known = [value for value in (sent, textbook, expected) if value is not None]
    return cell_row(
        group, groups, megabytes=sent / 1e6, text=text, end=max(known) / 1e6,
        textbook=None if textbook is None else textbook / 1e6,
        expected=None if expected is None else expected / 1e6,
        unexpected=expected / 1e6 if expected is not None and unexpected else None,
    )  # fmt: skip


def _ticks(rows: Sequence[Row]) -> str:
    text = "Vertical marks: the textbook (ZeRO paper)."
    judged = [row for row in rows if row["expected"] is not None]
    if any(row["unexpected"] is not None for row in rows):
        return f"{text} Red: bytes expected of the implementation, where it sent others."
    if not judged:
        return text
    if len(judged) < len(rows):
        return f"{text} {len(judged)} of {len(rows)} cells have an expected volume, and sent it."
    return f"{text} Every cell sent the bytes expected of its implementation."


def _equal(value: float, other: float) -> bool:
    return abs(value - other) <= NEGLIGIBLE * abs(other)


PARTS = {DATA: "data", "forward": "forward", "backward": "backward", "step": "clipping and update"}
STAGES = "waiting for other stages"
Parts = Mapping[str, float]
PartsOf = Callable[[CellRuns], Parts]
TIME_TITLE = "time of a step, ms"


def phases_picture(comparison: Comparison) -> Picture | None:
    """Timed steps by phase; None where no phase was timed."""
    texts, colours = [prose("phases_picture")], PHASES
    if any(order.rounds > 1 for order in comparison.rankings.values()):
        texts.append(prose("phases_by_round"))
    if any(WAITING in rank.phase_seconds for group in comparison.groups for rank in group.record.ranks):
        texts.append(prose("phases_waiting"))
        colours = {**PHASES, STAGES: FAINT}
    text = " ".join(texts)
    return _picture("time", text, comparison, lambda rank: rank.phase_seconds, _phases, colours, "forward")


def overlap_picture(comparison: Comparison) -> Picture | None:
    """Traced steps by computing and communicating; None where none was traced."""
    parts = [p for group in comparison.groups for rank in group.record.ranks for p in rank.overlap]
    colours = DEVICE_ACTIVITIES if any(part.copy_seconds for part in parts) else ACTIVITIES
    text = prose("overlap_picture")
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
            own = of_cell if index == 0 else dict.fromkeys(of_cell)
            at = list(colours).index(name)
            rows.append(cell_row(group, known, part=name, milliseconds=time, order=at, **own))
        return rows

    every = rows_of_all(known, drawn, rows_of)
    firsts = [row for row in only_drawn(every) if row["total"] is not None]
    layers = [stack("milliseconds", TIME_TITLE, "part", colours), text_after("total")]
    return Picture(
        key=key,
        caption=caption(text, drawn, known),
        alt=f"Stacked bars of {TIME_TITLE}. {told(firsts, 'told')}.",
        chart=lambda: bar_chart(every, layers),
    )


def _phases(group: CellRuns) -> Parts:
    """Milliseconds by phase, medians of the runs that know it."""
    seconds = {name: [row.run.largest_median(part) for row in group.rows] for part, name in PARTS.items()}
    seconds[STAGES] = [row.run.least_median(WAITING) for row in group.rows]
    middles = {name: median_known(of_runs) for name, of_runs in seconds.items()}
    return {name: middle * 1e3 for name, middle in middles.items() if middle is not None}


def _overlap(group: CellRuns) -> Parts:
    parts = [part for row in group.rows for rank in row.record.ranks for part in rank.overlap]
    if not parts:
        return {}
    middle = quantities.median_step(parts)
    times = (middle.compute_seconds, middle.exposed_seconds, middle.idle_seconds)
    found = {name: seconds * 1e3 for name, seconds in zip(ACTIVITIES, times, strict=True)}
    if middle.copy_seconds:
        found[COPIES_ALONE] = max(0.0, (middle.seconds - sum(times)) * 1e3)
    return found
