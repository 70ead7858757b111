"""An estimate as a picture: memory, speed and exposed communication over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.backends.registry import strategy_of
from harness.judge.wording import listed
from harness.plan.answer import estimate
from harness.plan.prediction import Prediction
from harness.plan.question import Question
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.pictures.curves import LINE, Panel, decades
from harness.tell.pictures.drawing import LIMIT, look_of, write_plot

WIDTH, HEIGHT = 460, 240
LONGEST_NAME = 44


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Strategies with equal figures, over the number of ranks."""

    name: str
    rows: tuple[Prediction, ...]


def sizes_to_draw(asked: Question) -> Question:
    """The question over several numbers of ranks; of a single one, over powers of two up to it."""
    if len(asked.world_sizes) > 1:
        return asked
    (largest,) = asked.world_sizes
    per_node = asked.ranks_per_node
    powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    fitting = [size for size in powers if size <= per_node or size % per_node == 0]
    return replace(asked, world_sizes=(*fitting, largest))


def write_picture(rows: Sequence[Prediction], asked: Sequence[Question], path: Path) -> None:
    """Write the picture as SVG or PNG, by the file's suffix. Raises HarnessError where it cannot.

    rows: those of the questions, each about one number of ranks; of a single one, those that are drawn are
    estimated here, at its batch.
    """
    first = asked[0]
    sizes = tuple(size for one in asked for size in one.world_sizes)
    several = sizes_to_draw(replace(first, world_sizes=sizes))
    if len(sizes) == 1 and not first.is_open:
        rows = estimate(several)
    write_plot(estimate_picture(several, rows), path)


def estimate_picture(asked: Question, rows: Sequence[Prediction]) -> Picture:
    """Memory with the device's limit, and where a device is known, tokens/s and exposed communication."""
    curves = curves_of(rows)
    name = asked.model.name
    largest = max((row.world_size for curve in curves for row in curve.rows), default=None)
    needed = [
        f"{curve.name} {number(value)} GB"
        for curve in curves
        if (value := _needed(curve.rows[-1])) is not None and curve.rows[-1].world_size == largest
    ]
    return Picture(
        key="estimate",
        caption=f"Predicted memory and speed of {name} by strategy over the number of ranks.",
        alt=f"Predicted memory per rank of {name} on {largest} ranks: {listed(needed, len(needed))}.",
        chart=lambda: _chart(asked, curves, timed=any(row.speed is not None for row in rows)),
    )


def curves_of(rows: Sequence[Prediction]) -> list[Curve]:
    """One for all strategies whose figures are the same at every number of ranks."""
    by_label: dict[str, list[Prediction]] = {}
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


def _chart(asked: Question, curves: Sequence[Curve], *, timed: bool) -> dict[str, Any]:
    limit = asked.device.memory_bytes / 1e9 if asked.device is not None else None
    panels = [_panel(curves, "GB of memory per rank", _needed, limit=limit, is_log=True)]
    if limit is not None and asked.device is not None:
        panels[0]["layer"] += _limit(limit, f"{asked.device.name}: {limit:.1f} GB")
    if timed:
        panels.append(_panel(curves, "tokens/s per GPU", _tokens))
        panels.append(_panel(curves, "exposed communication, % of the step", _exposed))
    return {"vconcat": panels, "spacing": 24}


def _panel(
    curves: Sequence[Curve],
    title: str,
    read: Callable[[Prediction], float | None],
    *,
    limit: float | None = None,
    is_log: bool = False,
) -> dict[str, Any]:
    points = []
    for index, curve in enumerate(curves):
        known = [(row.world_size, value) for row in curve.rows if (value := read(row)) is not None]
        look = look_of(strategy_of(curve.rows[0].label)).fields()
        for place, (size, value) in enumerate(known, start=1):
            label = f"{curve.name} {number(value)}" if place == len(known) else None
            points.append({"curve": index, "x": size, "value": value, "label": label, **look})
    values = [point["value"] for point in points] + ([limit] if limit is not None else [])
    low = min(values) / 1.15 if is_log else 0.0
    sizes = sorted({row.world_size for curve in curves for row in curve.rows})
    return Panel(
        across="ranks", up=title, domain=(low, max(values) * 1.15 or 1.0), is_log=is_log,
        width=WIDTH, height=max(HEIGHT, int(LINE * len(curves))), x_axis={"format": ",d"},
        y_axis={"format": ",~f", **({"values": decades(min(values), max(values))} if is_log else {})},
    ).chart(points, sizes)  # fmt: skip


def _limit(limit: float, name: str) -> list[dict[str, Any]]:
    """The memory of the device: a line with its name."""
    one: dict[str, Any] = {"values": [{}]}
    at = {"y": {"datum": limit}}
    return [
        {
            "data": one,
            "mark": {"type": "rule", "color": LIMIT, "strokeWidth": 2, "strokeDash": [6, 3]},
            "encoding": at,
        },
        {
            "data": one,
            "mark": {
                "type": "text",
                "color": LIMIT,
                "align": "left",
                "baseline": "bottom",
                "dx": 4,
                "dy": -2,
            },
            "encoding": {**at, "x": {"value": 0}, "text": {"value": name}},
        },
    ]


def _needed(row: Prediction) -> float | None:
    return None if row.memory is None else row.memory.device_bytes / 1e9


def _tokens(row: Prediction) -> float | None:
    return None if row.speed is None else row.speed.tokens_per_second_per_gpu


def _exposed(row: Prediction) -> float | None:
    return None if row.speed is None else 100 * row.speed.exposed_seconds / row.speed.step_seconds
