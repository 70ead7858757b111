"""What may be said of an order and of the occasions behind it, for every sentence and caption."""

from __future__ import annotations

from collections.abc import Mapping

from harness.judge.ranking import Ranking
from harness.judge.repeats import Place
from harness.judge.wording import counted, listed, percent, ranks

ONE_OCCASION = "one occasion: changes between days are not in these intervals"


def slowest_words(order: Ranking) -> str:
    """'zero3 slowest at 31 % of ddp'; empty where the last by its median may be the fastest.

    Of several that none is shown to be slower than, the one of the lowest median, and who is tied with it.
    """
    name, first, tied = order.names[-1], order.names[0], order.trailers[:-1]
    if name in order.leaders:
        return ""
    share = percent(order.median(first) / order.median(name))
    if not tied:
        return f"{name} slowest at {share} of {first}"
    return f"{name} lowest at {share} of {first}, statistically tied with {listed(tied)}"


def unranked_words(order: Ranking) -> str:
    """Why cells that were not judged are in no order: 'too few runs to rank 5 cells: each needs 6'."""
    return f"too few runs to rank {counted(len(order.names), 'cell')}: each needs {order.runs_needed}"


def runs_needed_words(rankings: Mapping[Place, Ranking]) -> str:
    """'7 runs of each of the 10 cells on 2 ranks'; one number for each place, empty without any pair."""
    needed = {
        (place[1], len(order.names), order.runs_needed): None
        for place, order in rankings.items()
        if len(order.names) > 1
    }
    return listed(
        [f"{runs} runs of each of the {cells} cells on {ranks(size)}" for size, cells, runs in needed]
    )


def occasions_words(occasions: int) -> str:
    """What the occasions of a comparison mean for its intervals."""
    if occasions < 2:
        return ONE_OCCASION
    return f"{occasions} occasions: cells are compared within each, and an order must hold on all of them"
