"""What is printed of traces: collectives by kind and size, the JSON document, changes against a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from harness.nested import grouped, totals
from harness.traces.analysis import RankTrace, Skew
from harness.traces.device import COMMUNICATION
from harness.traces.strategy import Likeness

MOST_KERNELS = 10


Row = dict[str, Any]
"""Equal collectives of one rank, as --json prints them.

bytes: payload of one call, the complete tensor. seconds: of all calls; None: no kernel was recorded for one.
bus_bytes_per_second: of the median of the `bus_calls` whose duration, payload and group are known. kind: what
the name of the kernel says, where no launch tells the operation.
"""


def collective_rows(rank: RankTrace) -> list[Row]:
    """Collectives of a rank by operation, dtype, size and group; most time first."""
    alike = grouped(
        ((call.operation, call.dtype, call.elements, call.group, call.kernel), call) for call in rank.calls
    )
    rows = []
    for calls in alike.values():
        first = calls[0]
        rates = [rate for call in calls if (rate := call.bus_bytes_per_second) is not None]
        barrier, size = first.operation == "barrier", first.payload_bytes
        rows.append(
            {
                "rank": rank.rank, "operation": first.operation, "dtype": None if barrier else first.dtype,
                "elements": None if barrier else first.elements, "bytes": size,
                "group": first.group.name, "group_size": first.group.size,
                "group_ranks": None if first.group.ranks is None else list(first.group.ranks),
                "calls": len(calls), "seconds": _mean([call.seconds for call in calls], 1),
                "bus_bytes_per_second": median(rates) if rates else None, "bus_calls": len(rates),
                "kernel": first.kernel, "kind": first.kind,
                "total_bytes": None if size is None else size * len(calls),
            }
        )  # fmt: skip
    return sorted(
        rows, key=lambda row: (-(row["seconds"] or 0.0), -(row["total_bytes"] or 0), str(row["operation"]))
    )


K = TypeVar("K")


class Sums(NamedTuple):
    """Collectives of several ranks, means of the ranks; None: not known of one of them."""

    calls: float
    bytes: float | None
    seconds: float | None
    bus_bytes_per_second: float | None
    """The median of those of the ranks."""
    bus_calls: float


def summed(ranks: Sequence[RankTrace], key: Callable[[Row], K], *, of_all: bool = True) -> dict[K, Sums]:
    """The collectives of each key; without `of_all` means of those ranks only that have such."""
    alike = grouped((key(row), row) for rank in ranks for row in collective_rows(rank))
    found = {}
    for name, rows in alike.items():
        count = len(ranks) if of_all else len({row["rank"] for row in rows})
        calls, sizes, seconds, rates, timed = (
            [row[column] for row in rows]
            for column in ("calls", "total_bytes", "seconds", "bus_bytes_per_second", "bus_calls")
        )
        known = [rate for rate in rates if rate is not None]
        found[name] = Sums(
            sum(calls) / count, _mean(sizes, count), _mean(seconds, count),
            median(known) if known else None, sum(timed) / count,
        )  # fmt: skip
    return found


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
        "collectives": [row for rank in ranks for row in collective_rows(rank)],
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
    before, after = (summed(side, lambda row: (row["operation"], row["dtype"])) for side in (baseline, ranks))
    return [
        {
            "operation": operation, "dtype": dtype,
            **{
                f"{name}_{when}": getattr(of.get((operation, dtype)), name, None)
                for name in ("calls", "bytes", "seconds")
                for when, of in (("before", before), ("after", after))
            },
        }
        for operation, dtype in dict.fromkeys([*before, *after])
    ]  # fmt: skip


def _kernel_changes(ranks: Sequence[RankTrace], baseline: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Seconds per rank in kernels and copies by name; those that changed most."""
    seconds = [
        totals(
            (one.name, one.seconds / len(side))
            for rank in side
            for one in rank.kernels
            if one.kind.what != COMMUNICATION
        )
        for side in (baseline, ranks)
    ]
    both = {name: [side.get(name, 0.0) for side in seconds] for name in {**seconds[0], **seconds[1]}}
    changed = [(name, before, after) for name, (before, after) in both.items() if before != after]
    changed.sort(key=lambda one: (-abs(one[2] - one[1]), one[0]))
    return [
        {"kernel": name, "before_seconds": before, "after_seconds": after}
        for name, before, after in changed[:MOST_KERNELS]
    ]
