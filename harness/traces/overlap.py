"""Divides a stretch of a trace into computing, communicating, copying and neither: arithmetic on intervals.

Times are integers in nanoseconds. The figures are those of `record.OverlapPart`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LONGEST_WAITS = 10
Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Communication:
    """A collective while the transport works on it, waiting for the other ranks included."""

    name: str
    phase: str
    start: int
    end: int


class Operator(NamedTuple):
    """A stretch that the profiler saw on one thread of the host; stretches of a thread nest."""

    thread: int
    start: int
    end: int
    computes: bool
    transports: bool = False
    """Whether it is a transport's work on a collective: nothing inside of it computes."""


class RankActivity(NamedTuple):
    """What one rank did."""

    computing: Sequence[Interval]
    communications: Sequence[Communication]
    copies: Sequence[Interval] | None = None
    """Copies and memsets of a device; None: the host worked."""


def divide(step: int, window: Interval, work: RankActivity) -> dict[str, Any]:
    """One row in the form of `record.OverlapPart`; what lies outside of `window` is cut off."""
    stretches = Stretches(
        union(work.computing),
        union((c.start, c.end) for c in work.communications),
        None if work.copies is None else union(work.copies),
    )
    exposed = unhidden(stretches.talking, stretches.computing, window)
    longest = sorted(exposed, key=lambda stretch: stretch[0] - stretch[1])[:LONGEST_WAITS]
    waits = [_wait(stretch, work.communications) for stretch in longest]
    return {"step": step, **seconds_within(window, stretches), "waits": waits}


class Stretches(NamedTuple):
    """What one rank did, each as `union` gives it."""

    computing: Sequence[Interval]
    talking: Sequence[Interval]
    copies: Sequence[Interval] | None = None


def seconds_within(window: Interval, stretches: Stretches) -> dict[str, float | None]:
    """The figures of a window in the time that what lies in it takes, however long the trace is."""
    start, end = window
    busy, talking = _cut(stretches.computing, window), _cut(stretches.talking, window)
    copying = _cut(stretches.copies or (), window)
    exposed = subtract(talking, busy)
    return {
        "seconds": (end - start) / 1e9,
        "compute_seconds": length(busy) / 1e9,
        "communication_seconds": length(talking) / 1e9,
        "exposed_seconds": length(exposed) / 1e9,
        "copy_seconds": None if stretches.copies is None else length(copying) / 1e9,
        "idle_seconds": (end - start - length(union([*busy, *talking, *copying]))) / 1e9,
    }


def unhidden(
    stretches: Iterable[Interval], computing: Iterable[Interval], window: Interval
) -> list[Interval]:
    """Points of `stretches` within `window` beside which nothing computes."""
    return subtract(union(_clip(stretches, window)), union(_clip(computing, window)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Points of `intervals` that are not in `removed`; both as `union` gives them."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        index = first
        while index < len(removed) and removed[index][0] < end:
            if removed[index][0] > start:
                left.append((start, removed[index][0]))
            start = max(start, removed[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """Summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def computing_stretches(operators: Iterable[Operator]) -> list[Interval]:
    """When the innermost operator of some thread computes.

    An outer operator may call a hook that waits for a collective, so only the innermost one says what
    its thread is doing.
    """
    threads: dict[int, list[Operator]] = {}
    for operator in operators:
        threads.setdefault(operator.thread, []).append(operator)
    stretches: list[Interval] = []
    for nested in threads.values():
        # Outer before inner where both begin together.
        stretches += _innermost(sorted(nested, key=lambda operator: (operator.start, -operator.end)))
    return union(stretches)


def _innermost(operators: Sequence[Operator]) -> list[Interval]:
    stretches: list[Interval] = []
    open_ones: list[Operator] = []
    reached = transported = 0

    def advance(until: int) -> None:
        nonlocal reached
        while open_ones and reached < until:
            innermost = open_ones[-1]
            stop = min(innermost.end, until)
            begin = max(reached, transported)
            if innermost.computes and stop > begin:
                stretches.append((begin, stop))
            reached = max(reached, stop)
            if innermost.end <= reached:
                open_ones.pop()

    for operator in operators:
        advance(operator.start)
        reached = max(reached, operator.start)
        open_ones.append(operator)
        if operator.transports:
            transported = max(transported, operator.end)
    if open_ones:
        advance(max(operator.end for operator in open_ones))
    return stretches


def _wait(stretch: Interval, communications: Sequence[Communication]) -> dict[str, Any]:
    """A stretch of exposed communication, by the collective that covers most of it."""
    start, end = stretch
    longest = max(communications, key=lambda c: min(c.end, end) - max(c.start, start))
    return {"name": longest.name, "phase": longest.phase, "seconds": (end - start) / 1e9}


def _cut(stretches: Sequence[Interval], window: Interval) -> list[Interval]:
    """The part of disjoint intervals in order that lies in a window."""
    first = max(0, bisect_left(stretches, (window[0],)) - 1)
    return _clip(stretches[first : bisect_left(stretches, (window[1],))], window)


def _clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    first, last = window
    return [(max(a, first), min(b, last)) for a, b in intervals if a < last and b > first]
