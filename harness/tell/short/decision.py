"""Tables for a decision: which strategy fits so much memory, and what others cost on more ranks."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from harness.forms import families
from harness.forms.peaks.families import without_activations
from harness.forms.workload import Window, Workload
from harness.job.experiment import Question
from harness.judge.pipeline import pipeline_use
from harness.judge.repeats import Repeats
from harness.judge.volume import sent_per_step
from harness.judge.wording import ranks
from harness.record import Record
from harness.record.workload import of_record
from harness.tell.document import Block, Column, Line, Shown, Table
from harness.tell.formats import megabytes
from harness.tell.formats import percent as whole_percent
from harness.tell.short.stage import ComparisonScope, Read, bytes_frontier, peak, sent_once, states
from harness.tell.short.words import levels, names

MANY_RANKS = 64
MICRO_STEPS = 8
MOST_LEVELS = 8
NONE_FITS = "none of these: more ranks, or offload"
ON_CPU = (
    "Memory is calculated for GPUs: model states, weights gathered at once, gradients and buffers; "
    "activations come on top (harness estimate)."
)
STATES = "Memory is for model states after the backward pass; gathered weights and activations come on top."
MEASURED = (
    "Memory is the measured peak of a rank; with other micro-steps, what the strategy then holds more or "
    "less is calculated."
)


def decision_blocks(where: ComparisonScope, question: Question) -> list[Block]:
    """What to take by memory and micro-steps, then what each strategy holds and sends elsewhere."""
    blocks: list[Block] = []
    if question != "memory" and (rows := _thresholds(where)):
        columns = (
            Column("micro_steps", "micro-steps per update"),
            Column("memory", "memory per rank, MB"),
            Column("take", "take", align="left"),  # no "backend": a filter must not hide thresholds
            Column("sent", "sends per update, MB", megabytes),
        )
        blocks += [
            Line("Take the first row that fits: of those that fit it sends least."),
            Table(key="decision", columns=columns, rows=rows),
            Line(f"{_what_memory(where)} {_bubbles(where)}".strip(), "", "results"),
        ]
    if (table := _elsewhere(where, question)) is not None:
        steps = f", {MICRO_STEPS} micro-steps per update" if question != "memory" else ""
        text = f"Calculated per rank{steps}."
        blocks += [table, Line(text, "", "model_states")]
    return blocks


def _thresholds(where: ComparisonScope) -> list[list[Any]]:
    """A row for each amount of memory, without accumulation and with it."""
    if not min(where.figures(sent_once).values(), default=0.0):
        return []
    as_run = where.groups[0].record.world.accumulation_steps
    reads: dict[int, Read] = {
        as_run: sent_once,
        MICRO_STEPS: lambda group: sent_with(group.record, MICRO_STEPS),
    }
    found: dict[str, list[list[Any]]] = {}
    for steps, traffic in reads.items():
        memory = _memory(where, steps)
        cells = bytes_frontier(where, traffic, memory, simplest_first=True)
        amounts = [(group, memory(group), traffic(group)) for group in cells]
        rows = [[Shown(m, f"from {megabytes(m)}"), g.label, s] for g, m, s in amounts]
        if rows:
            found[str(steps)] = [*rows, [Shown(None, "less"), NONE_FITS, Shown(None, "")]]
    if len(found) > 1 and len(set(map(str, found.values()))) == 1:
        found = {" or ".join(found): next(iter(found.values()))}
    return [[steps, *row] for steps, rows in found.items() for row in rows]


def _what_memory(where: ComparisonScope) -> str:
    """Which memory `_memory` reads."""
    if not where.on_cpu:
        return MEASURED
    return ON_CPU if any(held_with(group.record, 1) for group in where.groups) else STATES


def _memory(where: ComparisonScope, steps: int) -> Read:
    """Of a rank with so many micro-steps: the measured peak; of CPU ranks what a GPU would hold."""
    if _what_memory(where) == STATES:
        return states

    def read(group: Repeats) -> float | None:
        record = group.record
        with_steps = held_with(record, steps)
        if where.on_cpu:
            return with_steps
        measured, as_run = peak(group), held_with(record, record.world.accumulation_steps)
        if steps == record.world.accumulation_steps or measured is None:
            return measured
        return None if with_steps is None or as_run is None else measured + with_steps - as_run

    return read


def _elsewhere(where: ComparisonScope, question: Question) -> Table | None:
    """What is held and sent on many ranks with accumulation; cells that are alike in one row."""

    def held(group: Repeats) -> float | None:
        steps = group.record.world.accumulation_steps if question == "memory" else MICRO_STEPS
        return held_with(group.record, steps, MANY_RANKS)

    reads: dict[str, tuple[str, Read]] = {
        "held_on_many": (f"memory on {ranks(MANY_RANKS)}, MB", held),
        "sent_on_many": (
            f"sent per update on {ranks(MANY_RANKS)}, MB",
            lambda group: sent_with(group.record, MICRO_STEPS, MANY_RANKS),
        ),
    }
    if question == "memory":
        reads.pop("sent_on_many")
    alike: dict[tuple[str, ...], tuple[list[str], list[float | None]]] = {}
    for group in where.groups:
        values = [read(group) for _, read in reads.values()]
        if any(value is not None for value in values):
            alike.setdefault(tuple(map(megabytes, values)), ([], values))[0].append(group.label)
    if len(alike) < 2:
        return None
    rows = sorted(alike.values(), key=lambda row: [value or 0.0 for value in row[1]], reverse=True)
    columns = [Column(key, title, megabytes) for key, (title, _) in reads.items()]
    return Table(
        key="elsewhere",
        columns=[Column("backends", "strategy", align="left"), *columns],
        rows=[[names(labels), *values] for labels, values in rows[:MOST_LEVELS]],
    )


def _bubbles(where: ComparisonScope) -> str:
    """What neither peak nor traffic shows of pipelines: how long their ranks wait by the schedule alone."""
    found = {
        group.label: use.expected_bubble
        for group in where.groups
        if (use := pipeline_use(group.record)) is not None
    }
    if not found:
        return ""
    waits = ", ".join(
        f"{names(labels)} {whole_percent(share)}" for labels, share in levels(found, whole_percent)
    )
    return f"Not in these figures: ranks of a pipeline wait {waits} of the passes (the bubble)."


def held_with(record: Record, accumulation_steps: int, world_size: int | None = None) -> int | None:
    """Bytes that the strategy needs on a GPU besides activations, on so many ranks (None: its own); None: no
    closed form."""
    workload = _what_if(record, accumulation_steps, world_size)
    return None if workload is None else without_activations(workload)


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
    workload = replace(workload, accumulation_steps=accumulation_steps, window=Window())
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
