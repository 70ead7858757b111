"""Places for names next to points and line ends, so that none covers another. All in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LINE = 14.0
"""Height of a line of text."""
LETTER = 6.4
"""Width of a letter, on the average."""
NEAREST, FARTHEST = 11.0, 70.0
"""How far from its point the middle of a label's edge may lie."""
POINT = 7.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """Where a text stands: left edge, middle of its height, width."""

    left: float
    middle: float
    width: float

    def covers(self, other: Box) -> bool:
        """Whether two texts overlap."""
        return (
            abs(self.middle - other.middle) < LINE
            and self.left < other.left + other.width
            and other.left < self.left + self.width
        )

    def holds(self, point: Point) -> bool:
        """Whether a mark at this point would lie under the text."""
        x, y = point
        return (
            abs(self.middle - y) < LINE / 2 + POINT - 2
            and self.left - POINT < x < self.left + self.width + POINT
        )


def along(corners: Sequence[Point]) -> list[Point]:
    """Points along a line through these corners, close enough that no text fits between them."""
    found = list(corners[:1])
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = int(max(abs(x1 - x0), abs(y1 - y0)) / LINE) + 1
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(1, steps + 1)]
    return found


def spread(places: Sequence[float], low: float, high: float, gap: float = LINE) -> list[float]:
    """The places moved apart to at least `gap`, in their order, within bounds if they fit.

    Neighbours that collide share the way: each group lies around the mean of its places.
    """
    groups: list[tuple[float, list[int]]] = []

    def middle_of(members: list[int]) -> float:
        half = gap * (len(members) - 1) / 2
        mean = sum(places[index] for index in members) / len(members)
        return min(max(mean, low + half), max(high - half, low + half))

    for index in sorted(range(len(places)), key=lambda i: places[i]):
        members = [index]
        while groups and middle_of(members) - groups[-1][0] < gap * (len(groups[-1][1]) + len(members)) / 2:
            members = groups.pop()[1] + members
        groups.append((middle_of(members), members))
    found = [0.0] * len(places)
    for middle, members in groups:
        for rank, index in enumerate(members):
            found[index] = middle + gap * (rank - (len(members) - 1) / 2)
    return found


def beside(
    points: Sequence[Point], texts: Sequence[str], width: float, height: float, lines: Sequence[Point] = ()
) -> list[Box]:
    """A box for the text of each point: the nearest free place around it, within the panel.

    `lines`: points along lines that texts should not lie on. Where nothing is free, the place with the
    fewest overlaps.
    """
    boxes: list[Box] = []
    for point, text in zip(points, texts, strict=True):
        candidates = _around(point, LETTER * len(text), width, height)

        def cost(box: Box) -> int:
            crossed = any(map(box.holds, lines))
            return sum(map(box.covers, boxes)) * 4 + sum(map(box.holds, points)) * 2 + crossed

        boxes.append(min(candidates, key=cost))
    return boxes


def _around(point: Point, wide: float, width: float, height: float) -> list[Box]:
    """Places to the right and left, above and below, nearer ones first; inside the panel if any is."""
    x, y = point
    steps = [0.0]
    while steps[-1] < FARTHEST:
        steps.append(steps[-1] + LINE / 2)
    found = []
    for up in steps:
        for dy in (-up, up) if up else (0.0,):
            gap = NEAREST if up < LINE else 4.0
            found += [Box(x + gap, y + dy, wide), Box(x - gap - wide, y + dy, wide)]
            if up >= LINE:
                found.append(Box(x - wide / 2, y + dy, wide))
    found.sort(key=lambda box: _distance(box, point))
    inside = [b for b in found if b.left >= 0 and b.left + b.width <= width and 0 <= b.middle <= height]
    return inside or found


def _distance(box: Box, point: Point) -> float:
    x, y = point
    across = max(box.left - x, x - box.left - box.width, 0.0)
    return across + abs(box.middle - y)
