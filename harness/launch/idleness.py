"""How long the processes of ranks have done nothing: neither computed nor read nor written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

IDLE_SHARE = 0.1
"""Of one processor: what helper threads take while the rank itself waits. The one that samples memory in
set-up was seen to take 4 % and to read 0.26 MB/s from /proc."""
IDLE_SECONDS = 0.2
IDLE_BYTES = 2**20
"""What waiting ranks may read and write meanwhile: warnings of libraries."""

Processes = Callable[[], Mapping[int, int] | None]
"""Process ids of the living ranks; None: not all of them are on this machine."""


@dataclass(frozen=True)
class _Usage:
    """Of a rank and the processes that it started."""

    processor_seconds: float
    moved_bytes: int


class Idleness:
    """Of the ranks of one run, from the first call of `seconds` on."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._since: float | None = None
        self._before: dict[int, _Usage] = {}

    def reset(self) -> None:
        """Begin anew with the next call of `seconds`."""
        self._since = None

    def seconds(self, now: float) -> float:
        """For how long no rank has done anything, as far as is known; 0 where that cannot be known."""
        processes = self._processes()
        if not processes:
            self._since = None
            return 0.0
        usage = {rank: _usage(process) for rank, process in processes.items()}
        since = self._since
        if since is None or usage.keys() != self._before.keys():
            self._since, self._before = now, usage
            return 0.0
        if any(_worked(self._before[rank], usage[rank], now - since) for rank in usage):
            self._since, self._before = now, usage
            return 0.0
        return now - since


def _worked(before: _Usage, after: _Usage, seconds: float) -> bool:
    # A process that ended takes its share with it: any change counts.
    computed = abs(after.processor_seconds - before.processor_seconds)
    moved = abs(after.moved_bytes - before.moved_bytes)
    return computed > IDLE_SECONDS + IDLE_SHARE * seconds or moved > IDLE_BYTES


def _usage(process: int) -> _Usage:
    seconds, moved = 0.0, 0
    try:
        rank = psutil.Process(process)
        family = [rank, *rank.children(recursive=True)]
    except psutil.Error:
        return _Usage(seconds, moved)
    for member in family:
        try:
            times, counters = member.cpu_times(), member.io_counters()
        except psutil.Error:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
        # Not `read_chars`, which counts /proc. What is read from a cache takes processor time; what a network
        # brings is written to files.
        moved += counters.write_chars + counters.read_bytes + counters.write_bytes
    return _Usage(seconds, moved)
