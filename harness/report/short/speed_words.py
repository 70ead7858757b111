"""Speed in a sentence: an order only where the runs support one."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.metrics import SPEED
from harness.compare.order_words import ONE_OCCASION, slowest_words, unranked_words
from harness.compare.ranking import Ranking
from harness.compare.repeats import Repeats
from harness.compare.speed import shares_cores
from harness.compare.statistics import LEVEL, median_interval
from harness.compare.wording import ranks
from harness.report.formats import number, percent
from harness.report.short.stage import Stage
from harness.report.short.words import names, sentence

FEW_TIMED_STEPS = 8
"""With fewer per run, speeds are rough."""


def speed_sentence(stage: Stage) -> str:
    """The fastest, those tied with it and the slowest; or why there is no order. Empty: nothing was timed."""
    timed = {group.label: group for group in stage.groups if group.values(SPEED)}
    order = stage.order
    if order is None or not timed or not order.names:
        return ""
    caveats = _caveats(list(timed.values()))
    if stage.comparison.occasions == 1 and len(order.names) > 1:
        caveats.append(ONE_OCCASION)
    return sentence(f"speed on {ranks(stage.size)}: {_order(order, timed)}", *caveats)


def _order(order: Ranking, timed: dict[str, Repeats]) -> str:
    first, last = (timed[order.names[place]] for place in (0, -1))
    highest, least = number(first.median(SPEED)), number(last.median(SPEED))
    if len(order.names) == 1:
        return f"only {first.label} was timed, at {highest} tokens/s"
    if not order.is_judged:
        return f"medians are {least} to {highest} tokens/s; {unranked_words(order)}"
    leaders = [n for n in order.leaders if order.judgement(first.label, n) == "within noise"]
    slowest = [words for words in (slowest_words(order),) if words]
    unjudged = [f"too few runs to judge {names(rest)}" for rest in (_unjudged(order),) if rest]
    if len(leaders) == len(order.names):
        return f"all {len(leaders)} are statistically tied at {least} to {highest} tokens/s"
    if len(leaders) == 1:
        claim = "has the highest median," if unjudged else "is fastest at"
        head = f"{first.label} {claim} {highest} tokens/s{_interval(first)}"
    else:
        slowest_leader = min(timed[name].median(SPEED) or 0.0 for name in leaders)
        head = (
            f"{names(leaders)} are statistically tied as fastest "
            f"({number(slowest_leader)} to {highest} tokens/s)"
        )
    return "; ".join([head, *slowest, *unjudged])


def _unjudged(order: Ranking) -> list[str]:
    """Cells that may be the fastest, since too few runs of them were made."""
    return [n for n in order.leaders if order.judgement(order.names[0], n) == "not judged"]


def _interval(group: Repeats) -> str:
    found = median_interval(group.values(SPEED))
    if found is None:
        return ""
    return f" ({percent(LEVEL)} interval {number(found.low)} to {number(found.high)})"


def _caveats(groups: Sequence[Repeats]) -> list[str]:
    fewest = min(len(steps) for group in groups for steps in group.timed_steps)
    clauses = []
    if any(shares_cores(row.record) for group in groups for row in group.rows):
        clauses.append("ranks share processor cores, so these speeds say little about the strategies")
    if fewest < FEW_TIMED_STEPS:
        clauses.append(f"only {fewest} timed steps per run, so speeds are rough")
    return clauses
