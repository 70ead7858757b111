"""Compares how long ranks stay in each phase of their start: one that stays behind is found early."""

from __future__ import annotations

from collections.abc import Mapping

START_PHASES = ("start", "rendezvous", "load data", "setup")
"""In their order; a rank is in the first before it said anything."""
TIMES_THE_OTHERS = 3.0


class StartWatch:
    """Of one run; `least_seconds` a rank may stay in a phase whatever the others needed."""

    def __init__(self, world_size: int, least_seconds: float, now: float) -> None:
        self._least_seconds = least_seconds
        self._index = dict.fromkeys(range(world_size), 0)
        self._since = dict.fromkeys(range(world_size), now)
        self._noted: set[int] = set()
        """Of the others, whose position cannot be seen, nothing is said."""
        self._needed: list[dict[int, float]] = [{} for _ in START_PHASES]
        """By phase and rank, how long the rank was in it."""

    def note(self, phases: Mapping[int, str | None], now: float) -> None:
        """Where each rank is; None: it has not said so yet."""
        self._noted.update(phases)
        for rank, phase in phases.items():
            before, index = self._index[rank], _index(phase)
            if index <= before:
                continue
            self._needed[before][rank] = now - self._since[rank]
            for skipped in range(before + 1, index):  # shorter than the time between two looks
                self._needed[skipped][rank] = 0.0
            self._index[rank], self._since[rank] = index, now

    def forgive(self, now: float) -> None:
        """Count anew: nobody looked for a while, since the machine slept or is overloaded."""
        self._since = dict.fromkeys(self._since, now)

    def late(self, now: float) -> str | None:
        """Which rank stays in a phase that others have finished, in words; None: none does."""
        for rank in sorted(self._noted):
            index = self._index[rank]
            if index == len(START_PHASES) or not (others := self._needed[index]):
                continue
            longest, waited = max(others.values()), now - self._since[rank]
            limit = max(self._least_seconds, TIMES_THE_OTHERS * longest)
            if waited > limit:
                return (
                    f"rank {rank} has been in '{START_PHASES[index]}' for {waited:.0f} s, where others "
                    f"needed {longest:.0f} s (the limit is {limit:.0f} s: {TIMES_THE_OTHERS:g} times as "
                    f"long, at least runtime.start_timeout_seconds, {self._least_seconds:g})"
                )
        return None


def _index(phase: str | None) -> int:
    if phase is None:
        return 0
    return START_PHASES.index(phase) if phase in START_PHASES else len(START_PHASES)
