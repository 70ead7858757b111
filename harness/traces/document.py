"""What `harness trace --json` prints, and the rows that people read, from the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.traces.analysis import RankTrace
from harness.traces.collectives import Call
from harness.traces.skew import Skew
from harness.traces.strategy import Likeness

MOST_KERNELS = 10


@dataclass(kw_only=True)
class CollectiveRow:
    """Equal collectives of one rank."""

    rank: int | None
    operation: str | None
    dtype: str | None
    elements: int | None
    bytes: int | None
    """Payload of one call: the complete tensor."""
    group: str | None
    group_size: int | None
    group_ranks: list[int] | None
    calls: int
    seconds: float | None
    """All of them together; None: no kernel was recorded for one of them."""
    bus_bytes_per_second: float | None
    """Of the median call."""
    kernel: str | None

    @property
    def total_bytes(self) -> int | None:
        return None if self.bytes is None else self.bytes * self.calls

    def as_json(self) -> dict[str, Any]:
        """The figures for programs."""
        return vars(self) | {"total_bytes": self.total_bytes}


def collective_rows(rank: RankTrace) -> list[CollectiveRow]:
    """Collectives of a rank by operation, dtype, size and group; most time first."""
    alike: dict[tuple[Any, ...], list[Call]] = {}
    for call in rank.calls:
        key = (call.operation, call.dtype, call.elements, call.group, call.kernel)
        alike.setdefault(key, []).append(call)
    rows = [_row(rank.rank, calls) for calls in alike.values()]
    return sorted(rows, key=lambda row: (-(row.seconds or 0.0), -(row.total_bytes or 0), str(row.operation)))


def _row(rank: int | None, calls: Sequence[Call]) -> CollectiveRow:
    first = calls[0]
    seconds = [call.seconds for call in calls]
    rates = sorted(rate for call in calls if (rate := call.bus_bytes_per_second) is not None)
    barrier = first.operation == "barrier"
    return CollectiveRow(
        rank=rank, operation=first.operation, dtype=None if barrier else first.dtype,
        elements=None if barrier else first.elements, bytes=first.payload_bytes, group=first.group.name,
        group_size=first.group.size,
        group_ranks=None if first.group.ranks is None else list(first.group.ranks),
        calls=len(calls), seconds=None if None in seconds else sum(s for s in seconds if s is not None),
        bus_bytes_per_second=rates[len(rates) // 2] if rates else None, kernel=first.kernel,
    )  # fmt: skip


def document(
    ranks: Sequence[RankTrace],
    skew: Skew | None,
    likeness: Sequence[Likeness],
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `harness trace --json` prints: seconds and bytes; null is n/a."""
    found = {
        "ranks": [
            {"rank": rank.rank, **rank.division.as_json()}
            | {
                "file": rank.file, "world_size": rank.world_size, "backend": rank.backend,
                "device": rank.device_name,
                "on_device": rank.on_device, "remarks": rank.remarks,
            }
            for rank in ranks
        ],
        "collectives": [row.as_json() for rank in ranks for row in collective_rows(rank)],
        "steps": [
            {"rank": step.rank, "step": step.step, "is_complete": step.is_complete}
            | (step.division.as_json() if step.division else dict.fromkeys(ranks[0].division.as_json()))
            for rank in ranks
            for step in rank.steps
        ],
        "waits": skew.as_json() if skew else None,
        "strategies": [
            {"rank": rank.rank, **like.as_json()} for rank, like in zip(ranks, likeness, strict=True)
        ],
    }  # fmt: skip
    return found if changes is None else found | {"changes": changes}


def changes_of(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> dict[str, Any]:
    """Two traces compared: mean figures of the ranks, collectives and kernels that changed most."""
    return {
        "figures": [
            {"figure": name, "before": before, "after": after, "change": _change(before, after)}
            for name in ranks[0].division.as_json()
            if (before := _mean(baseline, name)) is not None or _mean(ranks, name) is not None
            for after in [_mean(ranks, name)]
        ],
        "step_seconds": {"before": _step_seconds(baseline), "after": _step_seconds(ranks)},
        "collectives": _collective_changes(ranks, baseline),
        "kernels": _kernel_changes(ranks, baseline),
    }


def _change(before: float | None, after: float | None) -> float | None:
    return None if not before or after is None else after / before - 1


def _mean(ranks: Sequence[RankTrace], name: str) -> float | None:
    values = [rank.division.as_json()[name] for rank in ranks]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _step_seconds(ranks: Sequence[RankTrace]) -> float | None:
    times = sorted(step.division.seconds for rank in ranks for step in rank.steps if step.division)
    return times[len(times) // 2] if times else None


def _collective_changes(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> list[dict[str, Any]]:
    before, after = _by_operation(baseline), _by_operation(ranks)
    return [
        {
            "operation": operation, "dtype": dtype,
            **{
                f"{name}_{when}": of.get((operation, dtype), (None, None, None))[place]
                for place, name in enumerate(("calls", "bytes", "seconds"))
                for when, of in (("before", before), ("after", after))
            },
        }
        for operation, dtype in dict.fromkeys([*before, *after])
    ]  # fmt: skip


Totals = tuple[float | None, float | None, float | None]


def _by_operation(ranks: Sequence[RankTrace]) -> dict[tuple[str | None, str | None], Totals]:
    """Calls, bytes and seconds per rank by operation and dtype."""
    rows: dict[tuple[str | None, str | None], list[CollectiveRow]] = {}
    for rank in ranks:
        for row in collective_rows(rank):
            rows.setdefault((row.operation, row.dtype), []).append(row)
    count = len(ranks)
    return {
        key: (
            sum(row.calls for row in of) / count,
            _whole([row.total_bytes for row in of], count),
            _whole([row.seconds for row in of], count),
        )
        for key, of in rows.items()
    }


def _whole(values: Sequence[float | None], count: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / count if len(known) == len(values) else None


def _kernel_changes(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Seconds per rank in kernels and copies by name; those that changed most."""
    before, after = _kernels(baseline), _kernels(ranks)
    names = sorted({*before, *after}, key=lambda name: (-abs(after.get(name, 0) - before.get(name, 0)), name))
    return [
        {"kernel": name, "before_seconds": before.get(name, 0.0), "after_seconds": after.get(name, 0.0)}
        for name in names[:MOST_KERNELS]
        if before.get(name, 0.0) != after.get(name, 0.0)
    ]


def _kernels(ranks: Sequence[RankTrace]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for rank in ranks:
        for name, (time, _) in rank.kernels.items():
            totals[name] = totals.get(name, 0.0) + time / 1e9 / len(ranks)
    return totals
