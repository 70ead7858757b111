"""Tables for a decision: which strategy fits so much memory, and what others cost on more ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from harness.forms import families
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
from harness.tell.short.stage import ComparisonScope, bytes_frontier, memory_to_decide, sent_once
from harness.tell.short.words import levels, names

Traffic = Callable[[Repeats], float | None]
MANY_RANKS = 64
MICRO_STEPS = 8
MOST_STEPS = 3
"""Thresholds for each number of micro-steps."""
MOST_LEVELS = 8
NONE_FITS = "none of these: more ranks, or offload"
STATES = (
    "Memory is for model states (weights, gradients, optimizer); activations and buffers come on top: "
    "harness estimate predicts them for your GPU."
)
PEAKS = "Memory is the measured peak of a rank."


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
            Line("The first row that fits; of those that fit it sends least."),
            Table(key="decision", columns=columns, rows=rows),
            Line(" ".join(filter(None, (STATES if where.on_cpu else PEAKS, _bubbles(where)))), "", "results"),
        ]
    if (table := _elsewhere(where, question)) is not None:
        blocks += [table, Line("Calculated in closed form, per rank.", "", "model_states")]
    return blocks


def _thresholds(where: ComparisonScope) -> list[list[Any]]:
    """A row for each amount of memory, without accumulation and with it."""
    if not min(where.figures(sent_once).values(), default=0.0):
        return []
    reads: dict[int, Traffic] = {1: sent_once, MICRO_STEPS: _accumulated}
    found: dict[str, list[list[Any]]] = {}
    for steps, traffic in reads.items():
        cells = bytes_frontier(where, traffic, memory_to_decide(where))[:MOST_STEPS]
        amounts = [(group, memory_to_decide(where)(group), traffic(group)) for group in cells]
        rows = [[Shown(m, f"from {megabytes(m)}"), g.label, s] for g, m, s in amounts]
        if rows:
            found[str(steps)] = [*rows, [Shown(None, "less"), NONE_FITS, Shown(None, "")]]
    if len(found) > 1 and len(set(map(str, found.values()))) == 1:
        found = {" or ".join(found): next(iter(found.values()))}
    return [[steps, *row] for steps, rows in found.items() for row in rows]


def _accumulated(group: Repeats) -> float | None:
    return sent_with(group.record, MICRO_STEPS)


def _elsewhere(where: ComparisonScope, question: Question) -> Table | None:
    """Model states on many ranks, traffic with accumulation; cells that are alike in one row."""
    reads: dict[str, tuple[str, Traffic]] = {
        "states_on_many": (
            f"model states on {ranks(MANY_RANKS)}, MB",
            lambda group: states_on(group.record, MANY_RANKS),
        ),
        "sent_accumulated": (f"sent per update of {MICRO_STEPS} micro-steps, MB", _accumulated),
    }
    if question == "memory":
        reads.pop("sent_accumulated")
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


def states_on(record: Record, world_size: int) -> int | None:
    """Bytes of model states of the rank that would hold most on so many ranks; None: no closed form.

    Hybrid strategies and meshes have none: their groups may stay as they are or grow.
    """
    workload = _built_in(record)
    if workload is None or workload.strategy.facts.has_replicas or record.world.dimensions:
        return None
    other = replace(workload, world_size=world_size, shard_size=world_size, ranks_per_node=None)
    held = [families.model_states(replace(other, rank=rank)) for rank in range(world_size)]
    return None if held[0].unknown else max(of_rank.model_state_bytes for of_rank in held)


def sent_with(record: Record, accumulation_steps: int) -> float | None:
    """Ring bytes that a rank sends in an ordinary step of so many micro-steps, mean over the ranks; None: no
    closed form."""
    workload = _built_in(record)
    if workload is None:
        return None
    other = replace(workload, accumulation_steps=accumulation_steps, window=Window())
    ranks = record.world.world_size if record.world.dimensions else 1  # of which one stands for all
    sent = [
        sent_per_step(of_rank, families.collectives(of_rank))
        for of_rank in (replace(other, rank=rank) for rank in range(ranks))
    ]
    return None if None in sent else fmean(part for part in sent if part is not None)


def _built_in(record: Record) -> Workload | None:
    """The workload of a built-in backend; a third party's own forms hold for its run alone."""
    if record.backend.own_forms is not None or record.backend.effective is None:
        return None
    workload = of_record(record)
    if workload is None or workload.strategy.family not in families.FAMILIES:
        return None
    return workload
