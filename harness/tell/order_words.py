"""What may be said of an order and of the sessions behind it, for every table, sentence and caption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from harness.judge.comparison import Comparison
from harness.judge.ranking import EQUAL, Ranking, Ratio
from harness.judge.repeats import BASE
from harness.judge.statistics import LEVEL, interval_runs
from harness.judge.wording import counted, listed
from harness.tell.document import Column, Shown
from harness.tell.formats import NOT_AVAILABLE, number, one_line, percent, times

ONE_SESSION = "one session: day-to-day variation is not included"
OPEN = "~"
LEGEND = (
    f"ratio to the base within rounds of runs, {percent(LEVEL)} interval; bold: faster, slower, or equal "
    f"within {percent(EQUAL)}; {OPEN}: undecided"
)
SHARES = {1 / 5: "a fifth", 1 / 4: "a quarter", 1 / 3: "a third", 1 / 2: "half", 2 / 3: "two thirds"}
MOST_NAMES = 2
NEAR = 0.05
"""Relative, within which a share has a name."""


def ratio_column(orders: Iterable[Ranking]) -> Column:
    """'speed / ddp', or by the first cell that is listed where that was the base."""
    return Column("speed_ratio", f"speed / {bases_words(orders)}", number)


def bases_words(orders: Iterable[Ranking]) -> str:
    """'ddp'; 'the first' where places have several bases."""
    bases = {order.base.partition(" (")[0] for order in orders if len(order.names) > 1} or {BASE}
    return one_line(bases.pop()) if len(bases) == 1 else "the first"


def ratio_cell(order: Ranking | None, label: str) -> Shown | None:
    """'0.38 (0.33 to 0.44)', marked where it is open; None where the cell is compared with none."""
    if order is None or len(order.names) < 2 or label not in order.names:
        return None
    if label == order.base:
        return Shown(1.0, "1")
    return shown_ratio(order.ratio(label, order.base))


def shown_ratio(ratio: Ratio, show: Callable[[float], str] = times) -> Shown | None:
    """A ratio with its interval, marked where it is open; None of cells that share no round."""
    if ratio.middle is None:
        return None
    mark = OPEN if ratio.order == "open" else ""
    return Shown(ratio.middle, f"{mark}{ratio_text(ratio, show)}", is_strong=not mark)


def clock_words(comparison: Comparison) -> str:
    """Which orders the time without what others took does not share with wall time; empty where none."""
    found = [
        f"{cell} is {own.order}, {ratio_text(own)} times {base}'s speed (by wall time {wall.order})"
        for cell, base, wall, own in comparison.comparable.other_orders
    ]
    return f"Counting only the ranks' own time: {listed(found)}." if found else ""


def ratio_text(ratio: Ratio, show: Callable[[float], str] = times) -> str:
    """'0.38 (0.33 to 0.44)'; n/a without a round in common.

    Where an order is shown, an interval that is rounded to 1 does not read as if it held it: '0.33 to <1.00'.
    """
    if ratio.middle is None:
        return NOT_AVAILABLE
    if ratio.extent is None:
        return show(ratio.middle)
    low, high = show(ratio.extent.low), show(ratio.extent.high)
    low = f">{low}" if ratio.order == "faster" and low == show(1.0) else low
    high = f"<{high}" if ratio.order == "slower" and high == show(1.0) else high
    return f"{show(ratio.middle)} ({low} to {high})"


def fastest_words(order: Ranking) -> str:
    """'ddp and zero0 are fastest (equal within 5 %)'; those that none is shown to be ahead of.

    Several in an open order, the base among them: 'nothing is measurably faster than ddp'.
    """
    first, leaders = order.names[0], order.leaders
    if len(leaders) == 1:
        return f"{first} is fastest"
    if all(order.ratio(first, name).order == "equal" for name in leaders):
        return f"{listed(leaders, MOST_NAMES)} are fastest (equal within {percent(EQUAL)})"
    if order.base in leaders:
        return f"nothing is measurably faster than {order.base}"
    return f"fastest is {first} or {_others(leaders[1:])} (their order is open)"


def slowest_words(order: Ranking) -> str:
    """'zero3 is slowest, at a quarter of ddp's speed'; empty where the last may be the fastest.

    Several, none shown to be slower than another: 'zero3 and fsdp are slowest, at 29 % of ddp's speed'.
    """
    name = order.names[-1]
    if name in order.leaders:
        return ""
    base = order.base if order.base != name else order.names[0]
    share = order.ratio(name, base).middle or 0.0
    if len(order.trailers) > 1:
        shares = sorted(order.ratio(trailer, base).middle or share for trailer in order.trailers)
        extent = " to ".join(dict.fromkeys([percent(shares[0]), percent(shares[-1])]))
        others = (
            listed(order.trailers[:-1]) if len(order.trailers) == 2 else f"{len(order.trailers) - 1} others"
        )
        return f"{name} and {others} are slowest, at {extent} of {base}'s speed"
    named = [words for value, words in SHARES.items() if abs(share / value - 1) <= NEAR]
    return f"{name} is slowest, at {named[0] if named else percent(share)} of {base}'s speed"


def _others(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {len(names)} others"


def unranked_words(order: Ranking) -> str:
    """Why cells are in no order: 'too few rounds to rank 5 cells: 3 of 6'."""
    return f"too few rounds to rank {counted(len(order.names), 'cell')}: {order.rounds} of {interval_runs()}"


def sessions_words(sessions: int) -> str:
    """What the sessions of a comparison mean for its intervals."""
    if sessions < 2:
        return ONE_SESSION
    return f"{sessions} sessions: cells are compared within each, and an order must hold in all of them"
