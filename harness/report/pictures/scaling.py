"""Speed-up and efficiency over the number of ranks, with the ideal line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compare.scaling import Point
from harness.report.document import Picture
from harness.report.drawing import COLOURS, GREY, MARKERS, style
from harness.report.formats import shortened
from harness.report.pictures.bars import LONGEST_LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 24
Curves = Sequence[Sequence[Point]]


def strong_picture(curves: Curves) -> Picture | None:
    """Speed-up of one job, the fastest curves if there are many."""
    text = (
        "Strong scaling: speed-up over the smallest number of ranks, or over the reference where a backend "
        "did not run on one. Dashed: ideal."
    )
    return _picture("strong-scaling", text, curves, strong=True)


def weak_picture(curves: Curves) -> Picture | None:
    """Efficiency of jobs that grow with the ranks."""
    text = "Weak scaling: efficiency, the time on the smallest number of ranks over the time. Dashed: ideal."
    return _picture("weak-scaling", text, curves, strong=False)


def _picture(key: str, text: str, curves: Curves, *, strong: bool) -> Picture | None:
    if not curves:
        return None
    drawn = sorted(curves, key=lambda curve: curve[-1].step_seconds)[:MOST_CURVES]
    drawn = [curve for curve in curves if curve in drawn]
    if len(drawn) < len(curves):
        text += f" Drawn are the {len(drawn)} fastest of {len(curves)}; the table holds all."
    return Picture(
        key=key,
        caption=text,
        draw=lambda figure: _draw(figure, drawn, strong),
        height_inches=4.0 + 0.17 * ((len(drawn) + 3) // 3),
    )


def _draw(figure: Figure, curves: Curves, strong: bool) -> None:
    axis = figure.subplots()
    sizes = sorted({point.group.world_size for curve in curves for point in curve})
    several = len({point.group.record.job_id for curve in curves for point in curve[-1:]}) > 1 and strong
    places: dict[str, int] = {}
    layouts: Counter[str] = Counter()
    for curve in curves:
        # One colour for a backend; its curves differ in line style.
        backend = curve[-1].group.backend
        place = places.setdefault(backend, len(places))
        line = style(place + layouts[backend] * len(COLOURS))
        layouts[backend] += 1
        name = shortened(curve[-1].curve, LONGEST_LABEL)
        across = [point.group.world_size for point in curve]
        up = [point.speed_up if strong else point.weak_efficiency for point in curve]
        label = f"{name}, job {curve[-1].group.record.job_id[:6]}" if several else name
        marker = MARKERS[place % len(MARKERS)]
        axis.plot(across, up, marker=marker, markersize=5, linewidth=1.2, label=label, **line)
    least = min(point.base.world_size for curve in curves for point in curve)
    ideal = [size / least for size in sizes] if strong else [1.0 for _ in sizes]
    axis.plot(sizes, ideal, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, label="ideal")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xticks([], minor=True)
    if strong:
        axis.set_yscale("log", base=2)
        low = min(point.speed_up for curve in curves for point in curve)
        powers = (2.0**power for power in range(-20, 14))
        ticks = [tick for tick in powers if low / 2 <= tick <= 2 * max(ideal)]
        axis.set_yticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
        axis.set_yticks([], minor=True)
        axis.set_ylim(0.9 * min(low, 1.0), 1.15 * max(ideal))
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("number of ranks")
    axis.set_ylabel("speed-up (times)" if strong else "weak-scaling efficiency (1 is ideal)")
    axis.grid()
    figure.legend(loc="outside lower center", ncols=3)
