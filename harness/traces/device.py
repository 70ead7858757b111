"""What runs on a device: what kernels are by their names, how long they take, why the device idles."""

from __future__ import annotations

import re
import tomllib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KERNELS = frozenset({"kernel", "concurrent_kernel"})
COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
DEVICE_ACTIVITIES = KERNELS | COPIES
"""Categories of what runs on a device. A `cuda_sync` and a `gpu_user_annotation` span such events."""

_TABLE = tomllib.loads(files(__package__).joinpath("kernels.toml").read_text(encoding="utf-8"))
_COMMUNICATION = [(re.compile(row["pattern"]), row) for row in _TABLE["communication"]]
_COMPUTING = [(re.compile(row["pattern"]), row["kind"]) for row in _TABLE["computing"]]
_LOCAL = re.compile(_TABLE["local"])
_BETWEEN_DEVICES = re.compile(r"\bPtoP\b|PeerToPeer", re.IGNORECASE)
"""A copy from one device to another: how copy engines do collectives."""
COMMUNICATION, COPY, OTHER = "communication", "copy", "other"
LONGEST_NAME = 4096
"""Characters that are looked at: patterns take the square of them at worst."""


class Kind(NamedTuple):
    """What an event of a device is, by its name."""

    what: str
    """'communication', 'copy', a kind of computing, or 'other': the name is unknown."""
    operation: str | None = None
    """Of communication: what it does, where the name tells."""
    library: str | None = None


@lru_cache(maxsize=100_000)
def kind_of(category: str, name: str) -> Kind:
    """What an event of a device is."""
    name = name[:LONGEST_NAME]
    if category in COPIES:
        return Kind(COMMUNICATION if _BETWEEN_DEVICES.search(name) else COPY)
    if not _LOCAL.search(name):
        for pattern, row in _COMMUNICATION:
            if pattern.search(name):
                return Kind(COMMUNICATION, row.get("kind"), row["library"])
    return Kind(next((kind for pattern, kind in _COMPUTING if pattern.search(name)), OTHER))


def is_communication(category: str, name: str) -> bool:
    """Whether an event of a device moves data between ranks, or waits for them."""
    return category in DEVICE_ACTIVITIES and kind_of(category, name).what == COMMUNICATION


def is_computing(category: str, name: str) -> bool:
    """Whether an event of a device is a kernel that does not communicate."""
    return category in KERNELS and not is_communication(category, name)


Interval = tuple[int, int]
Integers = npt.NDArray[np.int64]
Work = Callable[[Interval], dict[str, float | None]]
"""Figures of a window."""


def union(intervals: Iterable[Interval] | Integers) -> Integers:
    """Points of all intervals, as disjoint intervals in order: a row of begin and end each."""
    given = intervals if isinstance(intervals, np.ndarray) else [*intervals]
    every = np.asarray(given, dtype=np.int64).reshape(-1, 2)
    begins, ends = every[every[:, 1] > every[:, 0]].T
    order = np.argsort(begins)
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    new = begins[1:] > reached[:-1]
    first, last = (np.insert(new, at, True)[: len(begins)] for at in (0, len(new)))
    return np.stack([begins[first], reached[last]], axis=1)


def subtract(intervals: Integers, removed: Integers) -> Integers:
    """Points of `intervals` that are not in `removed`; both disjoint and in order."""
    at = np.unique(np.concatenate([intervals, removed]))
    inside, outside = (np.searchsorted(of.ravel(), at[:-1], side="right") % 2 for of in (intervals, removed))
    kept = inside > outside
    return union(np.stack([at[:-1][kept], at[1:][kept]], axis=1))


def cut(intervals: Integers, window: Interval) -> Integers:
    """The part of disjoint intervals in order that lies in a window."""
    begin, end = window
    first = np.searchsorted(intervals[:, 1], begin, side="right")
    return np.clip(intervals[first : np.searchsorted(intervals[:, 0], end)], begin, end)


def length(intervals: Integers) -> int:
    """Summed length of disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def division(computing: Integers, talking: Integers, copies: Integers | None = None) -> Work:
    """Figures of windows in the time that what lies in them takes, of what `union` gives; None: no copies."""
    either = union(np.concatenate([computing, talking]))
    busy = either if copies is None else union(np.concatenate([either, copies]))

    def within(window: Interval) -> dict[str, float | None]:
        span = window[1] - window[0]
        computes, talks, works, runs = (length(cut(of, window)) for of in (computing, talking, either, busy))
        return {
            "seconds": span / 1e9,
            "compute_seconds": computes / 1e9,
            "communication_seconds": talks / 1e9,
            "exposed_seconds": (works - computes) / 1e9,
            "copy_seconds": None if copies is None else length(cut(copies, window)) / 1e9,
            "idle_seconds": (span - runs) / 1e9,
        }

    return within


COMPUTES, COPIES_DATA, COMMUNICATES = 1, 2, 4


class Named(NamedTuple):
    """A name of events of devices."""

    name: str
    kind: Kind
    code: int
    """COMPUTES, COPIES_DATA and COMMUNICATES together."""


def named(category: str, name: str) -> Named:
    """What events of a device of this category and name do."""
    kind, copies = kind_of(category, name), category in COPIES
    code = COMMUNICATES if kind.what == COMMUNICATION else 0 if copies else COMPUTES
    return Named(name, kind, code | (COPIES_DATA if copies else 0))


class KernelTime(NamedTuple):
    """All kernels or copies of one name."""

    name: str
    kind: Kind
    calls: int
    seconds: float
    median_seconds: float
    share: float
    """Of the time of all kernels and copies together, whatever runs beside them."""


@dataclass
class DeviceEvents:
    """What ran on a device, a column each; times in nanoseconds."""

    names: list[Named]
    """Of all devices of a file."""
    begins: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    named: array[int] = field(default_factory=lambda: array("i"))
    """Index of each event's name."""
    correlations: array[int] = field(default_factory=lambda: array("q"))
    """-1: none."""

    def extend(self, other: DeviceEvents) -> None:
        """Take another device's events, too."""
        for name in ("begins", "ends", "named", "correlations"):
            getattr(self, name).extend(getattr(other, name))

    def union(self, code: int) -> Integers:
        """When any event that does this runs."""
        chosen = np.array([one.code & code for one in self.names], dtype=bool)[np.asarray(self.named)]
        return union(np.stack([np.asarray(self.begins)[chosen], np.asarray(self.ends)[chosen]], axis=1))

    def division(self) -> Work:
        """The figures of any window."""
        return division(*(self.union(code) for code in (COMPUTES, COMMUNICATES, COPIES_DATA)))

    def kernels(self) -> list[KernelTime]:
        """Kernels and copies by name, those with most time first."""
        which, spent = np.asarray(self.named), np.asarray(self.ends) - np.asarray(self.begins)
        order = np.argsort(which, kind="stable")
        every, found = int(spent.sum()) or 1, []
        for of in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
            if len(of):
                name, kind, _ = self.names[which[of[0]]]
                total, median = int(spent[of].sum()), float(np.median(spent[of]))
                found.append(KernelTime(name, kind, len(of), total / 1e9, median / 1e9, total / every))
        return sorted(found, key=lambda one: (-one.seconds, one.name))


HOST_LATE, WAITS_FOR_COMMUNICATION, WAITS_FOR_COPY = "host_late", "waits_for_communication", "waits_for_copy"
BETWEEN_KERNELS, UNKNOWN = "between_kernels", "unknown"
BEFORE_FIRST, AFTER_LAST = "before_first", "after_last"
IDLE_REASONS = (HOST_LATE, WAITS_FOR_COMMUNICATION, WAITS_FOR_COPY, BETWEEN_KERNELS, UNKNOWN)
"""Why nothing runs on a device between two events: the second was launched after the first had ended; it was
launched in time, after communication, a copy or a kernel; launch or cause were not recorded."""
LONGEST_DELAY = 1_000_000
"""Nanoseconds from the end of what an event waited for to its begin: streams and events take microseconds."""
ALWAYS = 2**62
NEVER = -ALWAYS
"""Nanoseconds that no clock reaches."""


@dataclass
class Launches:
    """What a process started on devices: correlation and begin of each launch."""

    correlations: array[int] = field(default_factory=lambda: array("q"))
    begins: array[int] = field(default_factory=lambda: array("q"))

    def of(self, events: DeviceEvents) -> Integers:
        """When each event was launched; NEVER: no launch is known that began before it."""
        known, begins = np.asarray(self.correlations), np.asarray(self.begins)
        asked, started = np.asarray(events.correlations), np.asarray(events.begins)
        if not len(known) or not len(asked):
            return np.full(len(asked), NEVER)
        order = np.lexsort((begins, known))
        at = np.searchsorted(known[order], asked, side="right") - 1
        found = order[np.maximum(at, 0)]
        fits = (at >= 0) & (known[found] == asked) & (asked >= 0) & (begins[found] <= started)
        return np.where(fits, begins[found], NEVER)


def gaps(events: DeviceEvents, launches: Launches) -> dict[str, Integers]:
    """Begin and end of the times at which nothing runs, by the reason; also before the first event and after
    the last.

    The launch decides, as in the idle time breakdown of HolisticTraceAnalysis, which looks at each stream.
    """
    begins, ends, launched = np.asarray(events.begins), np.asarray(events.ends), launches.of(events)
    order = np.lexsort((launched, begins))
    begins, ends, launched = begins[order], ends[order], launched[order]
    reached = np.maximum.accumulate(ends)
    last = np.maximum.accumulate(np.where(ends == reached, np.arange(len(ends)), 0))
    after = np.flatnonzero(begins[1:] > reached[:-1]) + 1
    codes = np.array([one.code for one in events.names])[np.asarray(events.named)[order][last[after - 1]]]
    opened, closed, launched = reached[after - 1], begins[after], launched[after]
    reason = np.select(
        [
            launched == NEVER,
            launched > opened,
            closed - opened > LONGEST_DELAY,
            codes & COMMUNICATES > 0,
            codes & COPIES_DATA > 0,
        ],
        [
            IDLE_REASONS.index(one)
            for one in (UNKNOWN, HOST_LATE, UNKNOWN, WAITS_FOR_COMMUNICATION, WAITS_FOR_COPY)
        ],
        IDLE_REASONS.index(BETWEEN_KERNELS),
    )
    every = np.stack([opened, closed], axis=1)
    return {name: every[reason == at] for at, name in enumerate(IDLE_REASONS)} | {
        BEFORE_FIRST: np.array([[NEVER, begins[0]]]), AFTER_LAST: np.array([[reached[-1], ALWAYS]]),
    }  # fmt: skip
