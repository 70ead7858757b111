"""Speed, memory and communication in the verdict: one clause each for the cells that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.compare.metrics import EXPECTED_SENT, SENT, SPEED, TRANSPORT_SENT
from harness.compare.order_words import slowest_words, tied_words, unranked_words
from harness.compare.ranking import Ranking
from harness.compare.repeats import Repeats, rank_speeds
from harness.compare.speed import shares_cores
from harness.compare.statistics import LEVEL, median_interval, value_range
from harness.compare.wording import counted, listed, ranks
from harness.report.formats import megabytes, number, percent
from harness.theory.transports import EMULATED

FEW_TIMED_STEPS = 8
"""With fewer per run, speeds are rough."""


def speed(groups: Sequence[Repeats], size: int, among: str) -> str:
    """The order of the cells by throughput as far as the runs support one; `among` says of which cells."""
    timed = {group.label: group for group in groups if group.values(SPEED)}
    order = rank_speeds(list(timed.values()))
    if not timed:
        return ""
    best = timed[order.names[0]]
    rate = number(best.median(SPEED))
    if len(timed) == 1:
        return f"on {ranks(size)} only {best.label}{among} was timed, at {rate} tokens/s"
    presets = {g.record.world.preset for g in timed.values() if g.record.backend.own_preset is None}
    preset = f" under the preset {presets.pop()}" if len(presets) == 1 else ""
    fewest = min(len(steps) for group in timed.values() for steps in group.timed_steps)
    head = _unordered if len(order.leaders) == len(timed) else _ordered
    first, *clauses = head(order, timed, among, preset)
    clauses.insert(0, f"on {ranks(size)} {first}")
    if any(shares_cores(row.record) for group in timed.values() for row in group.rows):
        clauses.append("ranks share processor cores, so these speeds say little about the strategies")
    if fewest < FEW_TIMED_STEPS:
        clauses.append(f"with only {counted(fewest, 'timed step')} per run, speeds are rough")
    return "; ".join(clauses)


def _ordered(order: Ranking, timed: Mapping[str, Repeats], among: str, preset: str) -> list[str]:
    """The fastest, those tied with it, and the slowest."""
    best = timed[order.names[0]]
    name = f"{best.label}, which diverged," if best.parity == "diverged" else best.label
    rate, extent = number(best.median(SPEED)), _extent(best.values(SPEED))
    claim = "is fastest" if len(order.leaders) == 1 else "has the highest median throughput"
    figure = f"{rate} tokens/s{extent}{preset}"
    slowest = slowest_words(order)
    return [f"{name} {claim}{among}: {figure}{slowest and f', {slowest}'}", *tied_words(order)]


def _unordered(order: Ranking, timed: Mapping[str, Repeats], among: str, preset: str) -> list[str]:
    """The range of the medians, where no cell is shown to be ahead of another."""
    most, least = (number(timed[order.names[n]].median(SPEED)) for n in (0, -1))
    medians = f"{most} tokens/s" if most == least else f"{least} to {most} tokens/s"
    if order.is_judged:
        return [f"all {len(timed)} cells{among} are statistically tied at medians of {medians}{preset}"]
    return [f"the medians of the {len(timed)} cells{among} are {medians}{preset}", unranked_words(order)]


def speed_of_one_process(groups: Sequence[Repeats], size: int) -> list[str]:
    """Throughput of the reference; empty where it is among the compared cells."""
    timed = [g for g in groups if g.is_reference and g.succeeded and g.values(SPEED)]
    if len(timed) != 1 or size == 1:
        return []
    threads = timed[0].record.world.threads_per_rank
    others = {g.record.world.threads_per_rank for g in groups if g.world_size == size}
    cut = ""
    if others != {threads}:
        cut = f" with {counted(threads, 'thread')} (ranks use {listed(sorted(map(str, others)))})"
    rate = number(timed[0].median(SPEED))
    return [f"the reference, one process{cut}, reaches {rate} tokens/s"]


def not_alike(size: int) -> str:
    """In place of speeds where conditions differ."""
    return (
        f"on {ranks(size)} no two cells were measured under the same conditions, so speeds are not compared"
    )


def _extent(values: Sequence[float]) -> str:
    """The interval of the median, or the range if there are too few runs for one."""
    interval, extent = median_interval(values), value_range(values)
    if interval is not None:
        return f" ({percent(LEVEL)} interval {number(interval.low)} to {number(interval.high)})"
    if extent is None or len(values) < 2:
        return ""
    return f" (range of {len(values)} runs {number(extent.low)} to {number(extent.high)})"


def memory(groups: Sequence[Repeats]) -> list[str]:
    """Peak memory per rank."""
    peaks = {group.label: max(group.rank_peaks) for group in groups if group.rank_peaks}
    if not peaks:
        return ["peak memory was not measured"]
    least, *fastest = _range(peaks, groups)
    return [f"on {ranks(groups[0].world_size)} peak memory per rank is {least}", *fastest]


def communication(groups: Sequence[Repeats]) -> list[str]:
    """Traffic per rank and step, and whether it is what the closed forms give."""
    sent = {g.label: value for g in groups if (value := g.median(SENT)) is not None}
    if not sent:
        return ["communication was not measured"]
    if not any(sent.values()):
        return ["nothing was communicated"] if groups[0].world_size > 1 else []
    off = []
    for group in groups:
        most = max(_bytes_off(group), key=abs, default=0.0)
        if abs(most) >= 1:
            off.append(f"{group.label} ({most:+,.0f} bytes)")
    unknown = [group.label for group in groups if group.label in sent and group.median(EXPECTED_SENT) is None]
    least, *fastest = _range(sent, groups)
    size = groups[0].world_size
    clauses = [f"on {ranks(size)} traffic per rank and step (ring algorithm) is {least}", *fastest]
    if off:
        clauses.append(f"not what the closed form expects: {listed(off)}")
    elif len(unknown) < len(sent):
        of = f" in the {len(sent) - len(unknown)} of {len(sent)} cells with a closed form" if unknown else ""
        clauses.append(f"as expected to the byte{of}")
    if unknown:
        clauses.append(f"without a closed form: {listed(unknown)}")
    return [*clauses, *_emulated(groups)]


def _emulated(groups: Sequence[Repeats]) -> list[str]:
    """What a transport sends that implements a collective as another one; empty where none does."""
    pairs = [(g.median(SENT), g.median(TRANSPORT_SENT), g) for g in groups]
    more = [(real, g) for ring, real, g in pairs if ring is not None and real is not None and real != ring]
    if not more:
        return []
    most, group = max(more, key=lambda pair: pair[0])
    transport = group.record.world.collectives
    instead = listed([f"{op} as {other}" for op, other in EMULATED[transport].items()]).replace("_", "-")
    return [f"{transport} implements {instead} and sends up to {megabytes(most)} MB"]


def _bytes_off(group: Repeats) -> list[float]:
    """Sent minus expected per step, of each repeat of which both are known."""
    pairs = [(row.figures[SENT], row.figures[EXPECTED_SENT]) for row in group.rows]
    return [sent - expected for sent, expected in pairs if sent is not None and expected is not None]


def _range(figures: Mapping[str, float], groups: Sequence[Repeats]) -> list[str]:
    """'1 MB (a, b) to 2 MB (c)' and 'the fastest, d, has 1.5 MB'."""
    least, most = min(figures.values()), max(figures.values())

    def who(value: float) -> str:
        return listed(
            [label for label, figure in figures.items() if megabytes(figure) == megabytes(value)], 4
        )

    if megabytes(least) == megabytes(most):
        return [f"{megabytes(most)} MB{' for each of them' if len(figures) > 1 else ''}"]
    clauses = [f"{megabytes(least)} MB ({who(least)}) to {megabytes(most)} MB ({who(most)})"]
    order = rank_speeds([group for group in groups if group.label in figures and group.values(SPEED)])
    if len(order.names) > 1 and len(order.leaders) == 1:
        (best,) = order.leaders
        clauses.append(f"the fastest, {best}, has {megabytes(figures[best])} MB")
    return clauses
