"""Horizontal bars, one for each cell, in a panel for each number of ranks; what rows say of their cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from harness.judge.repeats import CellRuns, place_to_compare
from harness.judge.wording import ranks
from harness.tell.formats import one_line, shortened
from harness.tell.pictures.drawing import GREY, Row, layer, look_of_record

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
        **look_of_record(record).fields(),
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
    return "; ".join(f"{place}: {', '.join(_ends(cells, most))}" for place, cells in places.items())


def _ends(texts: Sequence[str], most: int) -> Sequence[str]:
    """All, or so many from both ends."""
    if len(texts) <= most:
        return texts
    last = max(1, most // 3)
    return [*texts[: most - last], "...", *texts[-last:]]


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
    return layer("bar", x=quantity(field, title))


def stack(field: str, title: str, by: str, colours: Mapping[str, str]) -> Layer:
    """Bars cut into parts: a row each, with `field`, the name under `by` and the place under `order`."""
    x = {**quantity(field, title), "stack": "zero"}
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


def quantity(field: str, title: str | None = None) -> dict[str, Any]:
    """A channel with a number, from zero."""
    named = {"title": title} if title is not None else {}
    scale, axis = {"zero": True}, {"tickCount": 6}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis, **named}
