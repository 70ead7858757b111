"""Speed in a sentence: an order only where the runs support one."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.metrics import SPEED
from harness.judge.order_words import ONE_OCCASION, slowest_words, unranked_words
from harness.judge.ranking import Ranking
from harness.judge.repeats import Repeats, rank_speeds
from harness.judge.speed import shares_cores
from harness.judge.statistics import LEVEL, median_interval
from harness.judge.wording import counted, listed, ranks
from harness.report.formats import number, percent
from harness.report.short.stage import Stage
from harness.report.short.words import names, sentence

FEW_TIMED_STEPS = 8
"""With fewer per run, speeds are rough."""
ON_STUB = "No speed to compare: no kernel runs on a CUDA stub, so its durations are left out."
NOTHING_TIMED = "No speed to compare: no configuration that trains the same model was timed."


def speed_sentence(stage: Stage) -> str:
    """The fastest, those tied with it and the slowest; or why there is no order."""
    timed = stage.timed
    if not timed:
        return ON_STUB if any(group.record.on_stub for group in stage.groups) else NOTHING_TIMED
    if stage.is_alone:
        text = "no two cells were measured under the same conditions, so speeds are not compared"
    else:
        text = _order(stage.order or rank_speeds(list(timed.values())), timed)
    alone = reference_words(stage) if len(timed) > 1 else []
    caveats = _caveats(list(timed.values()))
    if stage.comparison.occasions == 1 and len(timed) > 1:
        caveats.append(ONE_OCCASION)
    return sentence(f"speed on {ranks(stage.size)}: {text}", *alone, *caveats)


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


def reference_words(stage: Stage) -> list[str]:
    """Throughput of one process on the same job; empty where it was not timed."""
    timed = [
        group
        for group in stage.comparison.groups
        if group.is_reference
        and group.record.job_id == stage.place[0]
        and group.succeeded
        and group.values(SPEED)
    ]
    if len(timed) != 1:
        return []
    threads = timed[0].record.world.threads_per_rank
    others = {group.record.world.threads_per_rank for group in stage.groups}
    cut = ""
    if others != {threads}:
        cut = f" with {counted(threads, 'thread')} (ranks use {listed(sorted(map(str, others)))})"
    return [f"one process{cut} reaches {number(timed[0].median(SPEED))} tokens/s"]


def _interval(group: Repeats) -> str:
    found = median_interval(group.values(SPEED))
    if found is None:
        return ""
    return f" ({percent(LEVEL)} interval {number(found.low)} to {number(found.high)})"


def _caveats(groups: Sequence[Repeats]) -> list[str]:
    fewest = min(len(steps) for group in groups for steps in group.timed_steps if steps)
    clauses = []
    if any(shares_cores(row.record) for group in groups for row in group.rows):
        clauses.append("ranks share processor cores, so these speeds say little about the strategies")
    if fewest < FEW_TIMED_STEPS:
        clauses.append(f"only {counted(fewest, 'timed step')} per run, so speeds are rough")
    return clauses
