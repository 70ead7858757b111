"""Who waits for whom: the same collective on several ranks. The rank that comes last runs it shortest.

Durations are compared, not times, so clocks of different machines do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.traces.analysis import RankTrace
from harness.traces.collectives import Call

Key = tuple[str, tuple[int, ...] | None, str | None, int | None, int | None]
MEETING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""No rank ends these before the last has come; the root of a broadcast does not wait."""


@dataclass
class RankWaits:
    """How one rank meets the others."""

    rank: int | None
    label: str
    waited_seconds: float = 0.0
    """In collectives, for a rank that came later."""
    caused_seconds: float = 0.0
    """What the others waited for it, as it came last: summed over them."""
    times_last: int = 0


@dataclass
class CollectiveSkew:
    """One kind of collective over the ranks."""

    operation: str
    payload_bytes: int | None
    matched: int
    mean_skew_seconds: float
    """From the arrival of the first to that of the last rank."""
    largest_skew_seconds: float
    last_rank: int | None
    """Which rank comes last most often."""


@dataclass(frozen=True)
class Skew:
    """What the ranks given say together."""

    ranks: Sequence[RankWaits]
    collectives: Sequence[CollectiveSkew]
    matched: int
    unmatched: Sequence[str]
    """Why collectives could not be matched."""

    def as_json(self) -> dict[str, Any]:
        """The figures for programs."""
        return {
            "ranks": [{key: value for key, value in vars(r).items() if key != "label"} for r in self.ranks],
            "collectives": [vars(c) for c in self.collectives],
            "matched": self.matched,
            "unmatched": list(self.unmatched),
        }  # fmt: skip


def skew_of(ranks: Sequence[RankTrace]) -> Skew | None:
    """How long ranks waited for each other; None: there is one rank."""
    if len(ranks) < 2:
        return None
    waits = [RankWaits(rank=rank.rank, label=rank.label) for rank in ranks]
    unmatched: list[str] = []
    rows: dict[tuple[str, int | None], list[tuple[float, int]]] = {}
    for key, members in _by_key(ranks).items():
        if len(members) < 2:
            continue
        counts = {index: len(calls) for index, calls in members.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{ranks[index].label}: {count}" for index, count in counts.items())
            unmatched.append(f"{key[0]}: numbers of calls differ ({shown})")
            continue
        for calls in zip(*members.values(), strict=True):
            _compare(list(members), calls, waits, rows, is_group_known=key[1] is not None)
    found = [_row(operation, payload, of, ranks) for (operation, payload), of in rows.items()]
    found.sort(key=lambda row: -row.mean_skew_seconds * row.matched)
    return Skew(waits, found, sum(row.matched for row in found), unmatched)


def _by_key(ranks: Sequence[RankTrace]) -> dict[Key, dict[int, list[Call]]]:
    keys: dict[Key, dict[int, list[Call]]] = {}
    for index, rank in enumerate(ranks):
        for call in rank.calls:
            if call.operation not in MEETING or not call.runs:
                continue
            group = call.group
            if group.size == 1 or (
                group.ranks is None and group.size and _is_part(group.size, rank.world_size)
            ):
                continue
            # What ranks hand to all-to-all differs; of groups without ranks, sizes are compared later.
            payload = call.payload_bytes if group.ranks and call.operation != "all_to_all" else None
            name = group.name if group.ranks is not None else None
            key = (call.operation, group.ranks, name, group.size, payload)
            keys.setdefault(key, {}).setdefault(index, []).append(call)
    return keys


def _is_part(size: int, world_size: int | None) -> bool:
    """Whether a group without known ranks need not hold the ranks given."""
    return world_size is not None and size < world_size


def _compare(
    members: Sequence[int], calls: Sequence[Call], waits: Sequence[RankWaits],
    rows: dict[tuple[str, int | None], list[tuple[float, int]]], *, is_group_known: bool,
) -> None:  # fmt: skip
    spans = [(min(s for s, _ in call.runs), max(e for _, e in call.runs)) for call in calls]
    if not is_group_known and max(s for s, _ in spans) >= min(e for _, e in spans):
        return  # not at the same time: they are of different groups
    payloads = {call.payload_bytes for call in calls}
    if len(payloads) > 1 and calls[0].operation != "all_to_all":
        return
    seconds = [call.seconds or 0.0 for call in calls]
    shortest = min(seconds)
    last = seconds.index(shortest)
    for index, of_rank in zip(members, seconds, strict=True):
        waits[index].waited_seconds += of_rank - shortest
    waits[members[last]].caused_seconds += sum(seconds) - shortest * len(seconds)
    waits[members[last]].times_last += 1
    operation = calls[0].operation or ""
    payload = None if operation == "all_to_all" else calls[0].payload_bytes
    rows.setdefault((operation, payload), []).append((max(seconds) - shortest, members[last]))


def _row(
    operation: str, payload: int | None, of: list[tuple[float, int]], ranks: Sequence[RankTrace]
) -> CollectiveSkew:
    lasts = [last for _, last in of]
    skews = [skew for skew, _ in of]
    return CollectiveSkew(
        operation=operation, payload_bytes=payload, matched=len(of), mean_skew_seconds=sum(skews) / len(of),
        largest_skew_seconds=max(skews), last_rank=ranks[max(set(lasts), key=lasts.count)].rank,
    )  # fmt: skip
