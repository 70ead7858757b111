"""What is printed of traces: collectives by kind and size, the JSON document, changes against a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from harness.traces.analysis import RankTrace, Skew
from harness.traces.collectives import Call
from harness.traces.device import COMMUNICATION
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
    """Of the median call, of an even number the mean of the middle two."""
    bus_calls: int
    """Calls whose duration, payload and group are known."""
    kernel: str | None
    kind: str | None
    """What the name of that kernel says it does, where no launch tells the operation."""

    @property
    def total_bytes(self) -> int | None:
        return None if self.bytes is None else self.bytes * self.calls


def collective_rows(rank: RankTrace) -> list[CollectiveRow]:
    """Collectives of a rank by operation, dtype, size and group; most time first."""
    alike: dict[tuple[Any, ...], list[Call]] = {}
    for call in rank.calls:
        key = (call.operation, call.dtype, call.elements, call.group, call.kernel)
        alike.setdefault(key, []).append(call)
    rows = []
    for calls in alike.values():
        first = calls[0]
        rates = [rate for call in calls if (rate := call.bus_bytes_per_second) is not None]
        barrier = first.operation == "barrier"
        rows.append(
            CollectiveRow(
                rank=rank.rank, operation=first.operation, dtype=None if barrier else first.dtype,
                elements=None if barrier else first.elements, bytes=first.payload_bytes,
                group=first.group.name, group_size=first.group.size,
                group_ranks=None if first.group.ranks is None else list(first.group.ranks),
                calls=len(calls), seconds=_mean([call.seconds for call in calls], 1),
                bus_bytes_per_second=median(rates) if rates else None,
                bus_calls=len(rates), kernel=first.kernel, kind=first.kind,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (-(row.seconds or 0.0), -(row.total_bytes or 0), str(row.operation)))


def _mean(values: Sequence[float | None], count: int) -> float | None:
    """Their sum over `count`; None where one is not known, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / count if known and len(known) == len(values) else None


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
        "collectives": [
            vars(row) | {"total_bytes": row.total_bytes} for rank in ranks for row in collective_rows(rank)
        ],
        "kernels": [
            {
                "rank": rank.rank, "name": one.name, **one.kind._asdict(), "calls": one.calls,
                "seconds": one.seconds, "median_seconds": one.median_seconds, "share": one.share,
            }
            for rank in ranks
            for one in rank.kernels
        ],
        "steps": [
            {"rank": rank.rank, "step": step.step, "is_complete": step.is_complete}
            | (step.division.as_json() if step.division else dict.fromkeys(ranks[0].division.as_json()))
            for rank in ranks
            for step in rank.steps
        ],
        "idle": [
            {"rank": rank.rank, "step": step} | {f"{name}_seconds": of for name, of in reasons.items()}
            for rank in ranks
            for step, division in ((None, rank.division), *((s.step, s.division) for s in rank.steps))
            if division and (reasons := division.idle_reasons) is not None
        ],
        "waits": {
            "ranks": [{key: value for key, value in vars(r).items() if key != "label"} for r in skew.ranks],
            "collectives": [vars(c) for c in skew.collectives],
            "matched": skew.matched,
            "unmatched": list(skew.unmatched),
        }
        if skew
        else None,
        "strategies": [
            {"rank": rank.rank, **vars(like)} for rank, like in zip(ranks, likeness, strict=True)
        ],
    }  # fmt: skip
    return found if changes is None else found | {"changes": changes}


def changes_of(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> dict[str, Any]:
    """Two traces compared: mean figures of the ranks, collectives and kernels that changed most."""
    figures = []
    for name in ranks[0].division.as_json():
        before, after = (
            _mean([rank.division.as_json()[name] for rank in side], len(side)) for side in (baseline, ranks)
        )
        if before is not None or after is not None:
            change = None if not before or after is None else after / before - 1
            figures.append({"figure": name, "before": before, "after": after, "change": change})
    return {
        "figures": figures,
        "step_seconds": {"before": _step_seconds(baseline), "after": _step_seconds(ranks)},
        "collectives": _collective_changes(ranks, baseline),
        "kernels": _kernel_changes(ranks, baseline),
    }


def _step_seconds(ranks: Sequence[RankTrace]) -> float | None:
    times = [step.division.seconds for rank in ranks for step in rank.steps if step.division]
    return median(times) if times else None


def _collective_changes(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> list[dict[str, Any]]:
    before, after = (totals(side, lambda row: (row.operation, row.dtype)) for side in (baseline, ranks))
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


K = TypeVar("K")
Totals = tuple[float, float | None, float | None]


def totals(ranks: Sequence[RankTrace], key: Callable[[CollectiveRow], K]) -> dict[K, Totals]:
    """Calls, bytes and seconds per rank of the collectives of each key."""
    rows = defaultdict[K, list[CollectiveRow]](list)
    for rank in ranks:
        for row in collective_rows(rank):
            rows[key(row)].append(row)
    count = len(ranks)
    return {
        key: (
            sum(row.calls for row in of) / count,
            _mean([row.total_bytes for row in of], count),
            _mean([row.seconds for row in of], count),
        )
        for key, of in rows.items()
    }


def _kernel_changes(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Seconds per rank in kernels and copies by name; those that changed most."""
    before, after = defaultdict[str, float](float), defaultdict[str, float](float)
    for seconds, side in ((before, baseline), (after, ranks)):
        for one in (kernel for rank in side for kernel in rank.kernels):
            seconds[one.name] += one.seconds / len(side) if one.kind.what != COMMUNICATION else 0
    changed = [name for name in {**before, **after} if before[name] != after[name]]
    changed.sort(key=lambda name: (-abs(after[name] - before[name]), name))
    return [
        {"kernel": name, "before_seconds": before[name], "after_seconds": after[name]}
        for name in changed[:MOST_KERNELS]
    ]
