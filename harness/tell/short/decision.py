"""Tables for a decision: which strategy fits so much memory, and what others cost on more ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

from harness.backends.entry import UnknownBackend
from harness.backends.registry import moving_parts
from harness.forms import families
from harness.forms.peak_memory.families import kinds_without_activations, without_activations
from harness.forms.terms import STATE_KINDS
from harness.forms.workload import ORDINARY_STEP, Workload
from harness.job.experiment import ReportFocus
from harness.judge.quantities import pipeline_use, sent_per_step
from harness.judge.rows import BASE, CellRuns
from harness.judge.wording import ranks
from harness.record import Record
from harness.record.workload import of_record
from harness.tell.document import Block, Column, Line, Shown, Table
from harness.tell.formats import megabytes
from harness.tell.formats import percent as whole_percent
from harness.tell.short.comparison_scope import (
    ComparisonScope,
    Read,
    falling,
    peak,
    rounded,
    sent_once,
    states,
)
from harness.tell.short.words import levels, names, unwrapped
from harness.tell.tables import prose

MANY_RANKS = 64
MICRO_STEPS = 8
MOST_LEVELS = 8
"""Of memory on many ranks, the least ones."""
MOST_LEFT = 8
"""Names of cells without a row."""
LEAST_STEP = 0.01
"""Of memory, between two thresholds."""
NONE_FITS = "none of these: more ranks, or offload"
HELD = prose("decision_held")
ON_CPU = f"Memory is calculated for GPUs. {HELD}"
REST = prose("decision_rest")
WITHOUT_ACTIVATIONS = "memory without activations"
STATES = "Memory is for model states after the backward pass; gathered weights and activations come on top."
MEASURED = prose("decision_measured")


def decision_blocks(where: ComparisonScope, question: ReportFocus) -> list[Block]:
    """What to take by memory and micro-steps, then what each strategy holds and sends elsewhere."""
    blocks: list[Block] = []
    if question != "memory" and min(where.figures(sent_once).values(), default=0.0):
        blocks += _thresholds(where)
    if (found := _elsewhere(where, question)) is not None:
        table, left_out = found
        steps = f", {MICRO_STEPS} micro-steps per update" if question != "memory" else ""
        is_said = any(isinstance(block, Line) and HELD in block.text for block in blocks)
        what = f"{REST} {_large_parts(where)}" if not steps else "" if is_said else HELD
        text = " ".join(filter(None, (f"Calculated per rank{steps}.", what.rstrip(), left_out)))
        blocks += [table, Line(text, "", "model_states")]
    return blocks


def _thresholds(where: ComparisonScope) -> list[Block]:
    """A row for each amount of memory, accumulated as in the run and with `MICRO_STEPS`."""
    as_run = where.groups[0].record.world.accumulation_steps
    sent = {as_run: where.figures(sent_once)}
    if as_run != MICRO_STEPS:
        sent[MICRO_STEPS] = where.figures(lambda group: sent_with(group.record, MICRO_STEPS))
    held, title, text = _memory(where, as_run)
    found: dict[str, list[list[Any]]] = {}
    for steps, traffic in sent.items():
        memory = held[steps]
        cells = worth_taking(where, traffic, memory)
        rows = [
            [Shown(memory[name], f"from {megabytes(memory[name])}"), name, traffic[name]] for name in cells
        ]
        if rows:
            found[str(steps)] = [*rows, [Shown(None, "less"), NONE_FITS, Shown(None, "")]]
    if len(found) > 1 and len(set(map(str, found.values()))) == 1:
        found = {" or ".join(found): next(iter(found.values()))}
    if not found:
        return []
    columns = (
        Column("micro_steps", "micro-steps"),
        Column("memory", f"{title}, MB"),
        Column("take", "take", align="left"),  # no "backend": a filter must not hide thresholds
        Column("sent", "sends, MB", megabytes),
    )
    lines = [[steps, *row] for steps, rows in found.items() for row in rows]
    shown = {row[2] for row in lines}
    judged = held[as_run].keys() & sent[as_run].keys() - shown - _bubbles(where).keys()
    left = [group.label for group in where.groups if group.label in judged]
    worse = names([label for label in left if unwrapped(label) not in shown], MOST_LEFT)
    rest = f"Left out, no better in memory or traffic: {worse}." if worse else ""
    differs = BASE in shown and len({held[steps].get(BASE) for steps in sent}) > 1
    twice = prose("decision_accumulated") if differs else ""
    return [
        Line(
            f"Take the first that fits; ordered by traffic, not speed. {ranks(where.size)}, "
            "by micro-steps per update."
        ),
        Table(key="decision", columns=columns, rows=lines),
        Line(" ".join(filter(None, (text, twice, rest, _without_pipelines(where)))), "", "results"),
    ]


def _memory(where: ComparisonScope, as_run: int) -> tuple[dict[int, dict[str, float]], str, str]:
    """By micro-steps and label the memory of a rank, its name, and how it is known."""

    def calculated(steps: int) -> dict[str, float]:
        return where.figures(lambda group: held_with(group.record, steps))

    held = {steps: calculated(steps) for steps in (as_run, MICRO_STEPS)}
    if where.on_cpu:
        if held[as_run]:
            return held, WITHOUT_ACTIVATIONS, ON_CPU
        return dict.fromkeys(held, where.figures(states)), "model states", STATES
    peaks = where.figures(peak)
    more = {name: count - held[as_run][name] for name, count in held[MICRO_STEPS].items()}
    accumulated = {name: peaks[name] + more[name] for name in peaks if name in more}
    return {MICRO_STEPS: accumulated} | {as_run: peaks}, "peak memory", MEASURED


def worth_taking(where: ComparisonScope, sent: Mapping[str, float], held: Mapping[str, float]) -> list[str]:
    """Labels in rising traffic and falling memory, of cells that send alike the fewest moving parts first.

    Without pipelines: they send least, and wait for it.
    """
    bubbles = _bubbles(where)
    known = [
        (label, (rounded(sent[label], 2), _moving_parts(label), rounded(held[label])))
        for label in (group.label for group in where.groups)
        if label in sent and label in held and label not in bubbles
    ]
    ordered = sorted(known, key=lambda pair: pair[1])
    return falling(((label, most) for label, (*_, most) in ordered), LEAST_STEP)


def _moving_parts(label: str) -> tuple[bool, float]:
    """Of a backend that is not installed, or that has no such options any more: the most."""
    try:
        return moving_parts(label)
    except UnknownBackend:
        return True, inf


def _elsewhere(where: ComparisonScope, question: ReportFocus) -> tuple[Table, str] | None:
    """What is held and sent on many ranks with accumulation, and which cells have no row.

    Cells that are alike share one.
    """

    def held(group: CellRuns) -> float | None:
        steps = group.record.world.accumulation_steps if question == "memory" else MICRO_STEPS
        return held_with(group.record, steps, MANY_RANKS)

    reads: dict[str, tuple[str, Read]] = {
        "held_on_many": (f"{WITHOUT_ACTIVATIONS}, MB", held),
        "sent_on_many": (
            "sent per update, MB",
            lambda group: sent_with(group.record, MICRO_STEPS, MANY_RANKS),
        ),
    }
    if question == "memory":
        del reads["sent_on_many"]
        parts: tuple[Read, ...] = (
            lambda group: states_with(group.record, MANY_RANKS),
            lambda group: gathered_with(group.record, MANY_RANKS),
        )
        reads["states_on_many"] = ("model states, MB", parts[0])
        reads["gathered_on_many"] = ("gathered weights, MB", parts[1])
        reads["rest_on_many"] = ("the rest, MB", lambda group: _remainder(held, parts, group))
    alike: dict[tuple[str, ...], tuple[list[str], list[float | None]]] = {}
    unknown = []
    for group in where.groups:
        values = [read(group) for _, read in reads.values()]
        if any(value is not None for value in values):
            alike.setdefault(tuple(map(megabytes, values)), ([], values))[0].append(group.label)
        else:
            unknown.append(group.label)
    if len(alike) < 2:
        return None
    rows = sorted(alike.values(), key=lambda row: [value or 0.0 for value in row[1]], reverse=True)
    columns = [Column(key, title, megabytes) for key, (title, _) in reads.items()]
    more = [label for labels, _ in rows[:-MOST_LEVELS] for label in labels]
    left_out = {"Not shown, needs more": more, f"No closed form on {ranks(MANY_RANKS)}": unknown}
    table = Table(
        key="elsewhere",
        columns=[Column("backends", f"strategy on {ranks(MANY_RANKS)}", align="left"), *columns],
        rows=[[names(labels), *values] for labels, values in rows[-MOST_LEVELS:]],
    )
    return table, " ".join(f"{why}: {names(cells, MOST_LEFT)}." for why, cells in left_out.items() if cells)


def _remainder(whole: Read, parts: Sequence[Read], group: CellRuns) -> float | None:
    """What the parts leave of the whole; None where one is unknown, or of another moment than the whole."""
    known = [value for read in (whole, *parts) if (value := read(group)) is not None]
    left = known[0] - sum(known[1:]) if len(known) == len(parts) + 1 else None
    return None if left is None or left < 0 else left


def least_on_many(where: ComparisonScope) -> tuple[list[str], float] | None:
    """Who needs least on many ranks besides activations, and how many bytes; None: fewer than two known."""
    held = where.figures(
        lambda group: held_with(group.record, group.record.world.accumulation_steps, MANY_RANKS)
    )
    found = levels(held, megabytes)
    return found[0] if len(found) > 1 else None


LARGE_PART = 1 / 4
"""Of model states, which needs an explanation."""


def _large_parts(where: ComparisonScope) -> str:
    """What the textbook does not count, of cells whose model states on many ranks are largely that."""
    found = []
    for group in where.groups:
        workload = _what_if(group.record, group.record.world.accumulation_steps, MANY_RANKS)
        made = None if workload is None else families.model_states(workload)
        for term in made.terms if made is not None else ():
            is_counted = term.extra and term.kind in STATE_KINDS
            if made is not None and is_counted and term.bytes > LARGE_PART * made.model_state_bytes:
                size = megabytes(term.bytes)
                found.append(f"{group.label}'s model states hold {size} MB of {term.kind}: {term.name}.")
    return " ".join(found)


def _bubbles(where: ComparisonScope) -> dict[str, float]:
    """Of the pipelines among the cells the share in which their ranks wait, by the schedule alone."""
    uses = {group.label: pipeline_use(group.record) for group in where.groups}
    return {label: use.expected_bubble for label, use in uses.items() if use is not None}


def _without_pipelines(where: ComparisonScope) -> str:
    """Why pipelines are in no row."""
    found = levels(_bubbles(where), whole_percent)
    if not found:
        return ""
    waits = ", ".join(f"{names(labels)} {whole_percent(share)}" for labels, share in found)
    return f"Pipelines are left out, since their ranks idle during part of a step (the bubble): {waits}."


def held_with(record: Record, accumulation_steps: int, world_size: int | None = None) -> int | None:
    """Bytes that the strategy needs on a GPU besides activations, on so many ranks (None: its own); None: no
    closed form."""
    workload = _what_if(record, accumulation_steps, world_size)
    return None if workload is None else without_activations(workload)


def gathered_with(record: Record, world_size: int) -> int | None:
    """Bytes of other ranks' weights at the fullest moment on so many ranks; None: no closed form."""
    workload = _what_if(record, record.world.accumulation_steps, world_size)
    held = None if workload is None else kinds_without_activations(workload)
    return None if held is None else held.get("gathered", 0)


def states_with(record: Record, world_size: int) -> int | None:
    """Bytes of model states of a rank, on so many; None: no closed form."""
    workload = _what_if(record, record.world.accumulation_steps, world_size)
    return None if workload is None else families.model_states(workload).model_state_bytes


def sent_with(record: Record, accumulation_steps: int, world_size: int | None = None) -> float | None:
    """Ring bytes that a rank sends in an ordinary step of so many micro-steps on so many ranks (None: its
    own), mean over the ranks; None: no closed form."""
    workload = _what_if(record, accumulation_steps, world_size)
    if workload is None:
        return None
    of = record.world.world_size if record.world.dimensions else 1  # of which one stands for all
    sent = [
        sent_per_step(of_rank, families.collectives(of_rank))
        for of_rank in (replace(workload, rank=rank) for rank in range(of))
    ]
    return None if None in sent else fmean(part for part in sent if part is not None)


def _what_if(record: Record, accumulation_steps: int, world_size: int | None) -> Workload | None:
    """The run's workload under other circumstances.

    Hybrid strategies and meshes have none on other ranks: their groups may stay as they are or grow.
    """
    workload = _built_in(record)
    if workload is None:
        return None
    workload = replace(
        workload, accumulation_steps=accumulation_steps, steps=(ORDINARY_STEP,), evaluation_every=None
    )
    if world_size in (None, record.world.world_size):
        return workload
    if workload.strategy.facts.has_replicas or record.world.dimensions:
        return None
    return replace(workload, world_size=world_size, shard_size=world_size, ranks_per_node=None)


def _built_in(record: Record) -> Workload | None:
    """The workload of a built-in backend; a third party's own forms hold for its run alone."""
    if record.backend.own_forms is not None or record.backend.effective is None:
        return None
    workload = of_record(record)
    if workload is None or workload.strategy.family not in families.FAMILIES:
        return None
    return workload
