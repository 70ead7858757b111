"""Scaling in a sentence for each kind: speed-up and efficiency at the largest number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED
from harness.judge.scaling import Point, strong_scaling, weak_scaling
from harness.judge.wording import counted, ranks
from harness.report.formats import number, percent
from harness.report.short.words import sentence

MOST_CURVES = 6
Curves = Sequence[Sequence[Point]]


def scaling_sentences(comparison: Comparison) -> list[str]:
    """At most one for strong and one for weak scaling."""
    strong, weak = strong_scaling(comparison), weak_scaling(comparison)
    return [
        *(_sentence("strong scaling", "speed-up", strong, _speed_up)),
        *(_sentence("weak scaling", "efficiency", weak, lambda point: percent(point.weak_efficiency))),
    ]


def _speed_up(point: Point) -> str:
    return f"{number(point.speed_up)} ({percent(point.strong_efficiency)})"


def _sentence(kind: str, figure: str, curves: Curves, show: Callable[[Point], str]) -> list[str]:
    """Medians of the runs at the most ranks that each backend has, in the order of the records."""
    if not curves:
        return []
    ends = [curve[-1] for curve in curves]
    size = max(point.group.world_size for point in ends)
    last = [point for point in ends if point.group.world_size == size]
    shown = ", ".join(f"{point.curve} {show(point)}" for point in last[:MOST_CURVES])
    more = f" and {len(last) - MOST_CURVES} more" if len(last) > MOST_CURVES else ""
    first = min(point.base.world_size for point in last)
    inside = " (efficiency)" if figure == "speed-up" else ""
    runs = min(len(point.group.values(SPEED)) for point in last)
    text = f"{kind} from {first} to {ranks(size)}, {figure}{inside}: {shown}{more}"
    return [sentence(text, f"medians of {counted(runs, 'run')}, not tested against noise")]
