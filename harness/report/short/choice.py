"""Which strategy to use and why: does it fit, then the links, then accumulation."""

from __future__ import annotations

from collections.abc import Callable

from harness.judge.comparison import Comparison
from harness.judge.pipeline import pipeline_use
from harness.judge.ranking import frontier
from harness.judge.repeats import Repeats
from harness.judge.slowest import explain_slowest, sent_with, states_on
from harness.judge.wording import ranks
from harness.report.document import Items, Line, Section
from harness.report.formats import megabytes, percent
from harness.report.short.stage import Stage, bytes_frontier, peak, sent_once, stage
from harness.report.short.words import ends, levels, names, ratio, sentence
from harness.spec import Question

Traffic = Callable[[Repeats], float | None]
ASKED: tuple[Question, ...] = ("all", "speed", "memory", "footprint")
SPEEDS: tuple[Question, ...] = ("all", "speed")
MANY_RANKS = 64
MICRO_STEPS = 8
MOST_LEVELS = 4
MOST_STEPS = 3


def choice_section(comparison: Comparison, question: Question) -> Section | None:
    """None where nothing is to be chosen: another question, one rank, or a single cell."""
    where = stage(comparison)
    if question not in ASKED or where is None or where.size == 1 or len(where.groups) < 2:
        return None
    lines = [Line(_growth(where), "Does it fit", "model_states")]
    speeds = [Line(_speed(where), "Speed here", "time"), Line(_slowest(comparison), "Slowest", "time")]
    if question != "memory":
        lines = [
            Line(_ladder(where), "Take", "results"),
            *(speeds if question in SPEEDS else []),
            *lines,
            Line(_links(where), "Slow links", "communication_volume"),
            Line(_accumulation(where), "Accumulation", "communication_volume"),
        ]
    found = [line for line in lines if line.text]
    return Section("choice", "Which to use", [Items(found)]) if found else None


def _ladder(where: Stage) -> str:
    """The cells to try in turn without accumulation and with it: the first that fits."""
    least = min(where.figures(sent_once).values(), default=0.0)
    if not least:
        return ""
    once, several = (_steps(where, traffic, least) for traffic in (sent_once, _accumulated))
    text = f"the first whose peak per rank fits, with its traffic: {once}"
    if several not in ("", once):
        text = f"{text}; with {MICRO_STEPS} micro-steps per update {several}"
    return "; ".join(filter(None, (text, _bubbles(where)))) + "."


def _bubbles(where: Stage) -> str:
    """What neither peak nor traffic shows of pipelines: how long their ranks wait by the schedule alone."""
    found = {
        group.label: use.expected_bubble
        for group in where.groups
        if (use := pipeline_use(group.record)) is not None
    }
    if not found:
        return ""
    waits = ", ".join(f"{names(labels)} {percent(share)}" for labels, share in levels(found, percent))
    return f"not in these figures: the bubble, in which ranks of a pipeline wait: {waits} of the passes"


def _steps(where: Stage, traffic: Traffic, least: float) -> str:
    """'ddp 38.5 MB (1 x), fsdp 31.3 MB (1.5 x)': peak, and traffic over the least of one micro-step."""
    return ", ".join(
        f"{group.label} {megabytes(peak(group))} MB ({ratio(traffic(group) or 0.0, least)})"
        for group in bytes_frontier(where, traffic)[:MOST_STEPS]
    )


def _accumulated(group: Repeats) -> float | None:
    return sent_with(group.record, MICRO_STEPS)


def _speed(where: Stage) -> str:
    """The same by speed, as far as the runs support an order, and whether it carries over."""
    order, peaks = where.order, where.figures(peak)
    if order is None or not order.is_judged or len(order.names) < 2:
        return ""
    best = order.names[0]
    steps = frontier(peaks, order)
    shares = ", ".join(
        f"{label} {percent(order.median(best) / order.median(label))} at {megabytes(peaks[label])} MB"
        for label in reversed(steps)
    )
    text = f"Pareto frontier of speed, relative to {best}, and peak memory: {shares}"
    return sentence(text, "measure speed again on your GPUs" if where.on_cpu else "")


def _slowest(comparison: Comparison) -> str:
    """How the slowest cell differs from the fastest that shards alike, and the cause if it was tested.

    Empty where the runs do not show that it is slower.
    """
    found = explain_slowest(comparison)
    return found.sentence if found is not None and found.gap == "beyond noise" else ""


def _growth(where: Stage) -> str:
    """Closed-form model states on more ranks."""
    found = where.figures(lambda group: states_on(group.record, MANY_RANKS))
    shown = levels(found, megabytes)
    if not shown:
        return ""
    parts = [f"{names(labels)} {megabytes(value)} MB" for labels, value in ends(shown, MOST_LEVELS)]
    open_ends = [group.label for group in where.groups if group.record.world.dimensions]
    return sentence(
        f"model states per rank on {ranks(MANY_RANKS)}, calculated: {', '.join(parts)}",
        f"not of {names(open_ends)}: they depend on how many ranks share samples" if open_ends else "",
    )


def _links(where: Stage) -> str:
    """Who sends least and how much more the others send."""
    found = where.figures(sent_once)
    value = min(found.values(), default=0.0)
    shown = levels(found, lambda sent: ratio(sent, value)) if value else []
    if len(shown) < 2:
        return ""
    (least, _), *others = shown
    more = ", ".join(
        f"{names(labels)} {ratio(sent, value)}" for labels, sent in ends(others, MOST_LEVELS - 1)
    )
    verb = "sends" if len(least) == 1 else "send"
    return f"{names(least)} {verb} least ({megabytes(value)} MB per rank and step); {more} of that."


def _accumulation(where: Stage) -> str:
    """Closed-form traffic with several micro-steps per update: who gathers or reduces in each."""
    shown = levels(where.figures(_accumulated), megabytes)
    if len(shown) < 2:
        return ""
    parts = [f"{names(labels)} {megabytes(value)} MB" for labels, value in ends(shown, MOST_LEVELS + 1)]
    return sentence(f"with {MICRO_STEPS} micro-steps per update a rank sends, calculated: {', '.join(parts)}")
