"""Which strategy to use and why: does it fit, then the links, then accumulation."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.metrics import SENT
from harness.compare.ranking import frontier
from harness.compare.repeats import Repeats
from harness.compare.slowest import explain_slowest
from harness.compare.what_if import sent_with, states_on
from harness.compare.wording import ranks
from harness.report.document import Items, Line, Section
from harness.report.formats import megabytes, percent
from harness.report.short.stage import Stage, bytes_frontier, peak, stage
from harness.report.short.words import ends, levels, names, ratio, sentence
from harness.spec import Question

ASKED: tuple[Question, ...] = ("all", "speed", "memory")
MANY_RANKS = 64
MICRO_STEPS = 8
MOST_LEVELS = 4
MOST_STEPS = 3


def choice_section(comparison: Comparison, question: Question) -> Section | None:
    """None where nothing is to be chosen: another question, one rank, or a single cell."""
    where = stage(comparison)
    if question not in ASKED or where is None or where.size == 1 or len(where.groups) < 2:
        return None
    lines = [
        _line("Take", _ladder(where) if question != "memory" else "", "results"),
        _line("Speed here", _speed(where) if question != "memory" else "", "time"),
        _line("Slowest", _slowest(comparison) if question != "memory" else "", "time"),
        _line("Does it fit", _growth(where), "model_states"),
        _line("Slow links", _links(where) if question != "memory" else "", "communication_volume"),
        _line("Accumulation", _accumulation(where) if question != "memory" else "", "communication_volume"),
    ]
    found = [line for line in lines if line.text]
    return Section("choice", "Which to use", [Items(found)]) if found else None


def _line(name: str, text: str, details: str) -> Line:
    return Line(text, name, details)


def _ladder(where: Stage) -> str:
    """The cells to try in turn: the first that fits."""
    steps = bytes_frontier(where)[:MOST_STEPS]
    if not steps:
        return ""
    first, *others = steps
    text = f"{first.label} while its peak of {megabytes(peak(first))} MB per rank fits: none sends less"
    for group in others:
        text += f"; else {group.label} ({megabytes(peak(group))} MB, sends {_times(group, first)})"
    return f"{text}."


def _times(group: Repeats, first: Repeats) -> str:
    sent, least = group.median(SENT), first.median(SENT)
    return ratio(sent, least) if sent is not None and least else f"{megabytes(sent)} MB"


def _speed(where: Stage) -> str:
    """The same by speed, as far as the runs support an order, and whether it carries over."""
    order = where.order
    peaks = {g.label: most for g in where.groups if (most := peak(g)) is not None}
    if order is None or not order.is_judged or len(order.names) < 2:
        return ""
    best = order.names[0]
    steps = frontier(peaks, order)
    shares = ", ".join(
        f"{label} {percent(order.median(best) / order.median(label))} at {megabytes(peaks[label])} MB"
        for label in steps
    )
    text = f"Pareto frontier of peak memory and speed, relative to {best}: {shares}"
    return sentence(text, "CPU ranks: measure speed again on your GPUs" if where.on_cpu else "")


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
    return sentence(f"model states per rank on {ranks(MANY_RANKS)}, in closed form: {', '.join(parts)}")


def _links(where: Stage) -> str:
    """Who sends least and how much more the others send."""
    found = where.figures(lambda group: group.median(SENT))
    value = min(found.values(), default=0.0)
    shown = levels(found, lambda sent: ratio(sent, value)) if value else []
    if len(shown) < 2:
        return ""
    (least, _), *others = shown
    more = ", ".join(
        f"{names(labels)} {ratio(sent, value)}" for labels, sent in ends(others, MOST_LEVELS - 1)
    )
    verb = "sends" if len(least) == 1 else "send"
    return f"{names(least)} {verb} least ({megabytes(value)} MB per rank and step), then {more}."


def _accumulation(where: Stage) -> str:
    """Closed-form traffic with several micro-steps per update: who gathers or reduces in each."""
    once = {g.label: sent for g in where.groups if (sent := sent_with(g.record, 1))}
    several = {g.label: sent for g in where.groups if (sent := sent_with(g.record, MICRO_STEPS))}
    growth = {label: several[label] / once[label] for label in several if label in once}
    shown = levels(growth, lambda value: f"{value:.3g}")
    if len(shown) < 2:
        return ""
    parts = [f"{names(labels)} {value:.3g} x" for labels, value in ends(shown, MOST_LEVELS)]
    return sentence(
        f"{MICRO_STEPS} micro-steps per update multiply traffic, in closed form: {', '.join(parts)}"
    )
