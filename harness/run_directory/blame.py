"""Which rank a failed run is blamed on: the one that ended first by itself, not those that miss it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.run_directory.events import FailureEvent
from harness.run_directory.outcome import TERMINATED, Outcome
from harness.run_directory.rank_events import RankEvents

UNNOTICED_SECONDS = 1.0
"""So long may a launcher take to see that a process is gone; its peers may fail earlier."""
LOST_PEER = re.compile(
    r"connection (?:reset|closed|refused|was likely closed)|broken pipe|closed by peer|remote peer|peer"
    r"|socket (?:timeout|closed)|timed out|timeout|DistNetworkError|DistStoreError|NCCL|store->get|recvvalue",
    re.IGNORECASE,
)
"""What libraries say when a rank that they wait for is gone."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How one rank ended before its time."""

    rank: int
    exit_code: int | None
    failure: FailureEvent | None = None
    """What the rank itself said; None: it said nothing."""
    order: tuple[int, float]
    """The least is the cause; the others follow from it."""


def cause_of(events: Mapping[int, RankEvents], outcome: Outcome) -> Cause | None:
    """The rank that ended first without having finished; None: no rank ended by itself."""
    return min(_causes(events, outcome), key=lambda cause: (cause.order, cause.rank), default=None)


def _causes(events: Mapping[int, RankEvents], outcome: Outcome) -> Iterator[Cause]:
    for rank, of_rank in events.items():
        code = outcome.exit_codes.get(rank)
        ended_at = outcome.ended_at.get(rank)
        if outcome.stopped is not None and code is None:
            continue  # it still ran when the launcher ended it
        if of_rank.failures:
            failure = of_rank.failures[0]
            yield Cause(rank=rank, exit_code=code, failure=failure, order=_order_of_failure(failure))
        elif of_rank.stopped is not None or (code in TERMINATED and not of_rank.done):
            at = of_rank.stopped.at if of_rank.stopped is not None else ended_at
            if code in TERMINATED or outcome.stopped is None:
                yield Cause(rank=rank, exit_code=code, order=(1, at or 0.0))
        elif code is not None and not of_rank.has_ended:
            yield Cause(rank=rank, exit_code=code, order=_order_of_silence(code, ended_at))
        elif rank in outcome.vanished:
            yield Cause(rank=rank, exit_code=None, order=(1, 0.0))
        elif code is None and not of_rank.has_ended and outcome.exit_codes:
            yield Cause(rank=rank, exit_code=None, order=(2, 0.0))


def _order_of_failure(failure: FailureEvent) -> tuple[int, float]:
    misses_a_peer = failure.status == "failed" and LOST_PEER.search(f"{failure.error_kind} {failure.message}")
    return (1 if misses_a_peer else 0), failure.at


def _order_of_silence(code: int, ended_at: float | None) -> tuple[int, float]:
    """Libraries abort where a peer is gone; who is killed otherwise, or leaves, is the cause."""
    if code == -signal.SIGABRT:
        return 1, ended_at or 0.0
    return 0, 0.0 if ended_at is None else ended_at - UNNOTICED_SECONDS
