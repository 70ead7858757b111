"""Overlap: how much communication computation hides, and what ranks waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.backends.registry import strategy_of
from harness.judge.cell import CellName, name_cells
from harness.judge.comparison import Comparison
from harness.judge.repeats import CellRuns, job_marks
from harness.judge.speed import median_step
from harness.record import OverlapPart, Record
from harness.tell.document import Block, Folded, Items, Paragraph, Section, Table
from harness.tell.formats import percent
from harness.tell.tables import prose, row_of, table_columns

MOSTLY, PARTLY = 0.8, 0.2
"""Shares of hidden communication from which on the words change."""
PREFETCH_SETTINGS = ("forward_prefetch", "backward_prefetch", "limit_all_gathers")
OFF = {"forward_prefetch": (False, 0), "backward_prefetch": ("none", 0)}


def overlap_words(share: float, record: Record) -> str:
    """One or two sentences; `share` of the communication is hidden.

    Prefetch is mentioned if the backend gathers weights and can do so ahead.
    """
    text = f"{percent(share)} of the communication is hidden: "
    if share >= MOSTLY:
        text += "it overlaps with computation."
    elif share >= PARTLY:
        text += "overlap works partly."
    else:
        text += "ranks wait for it."
    about_prefetch = _prefetch(share, record)
    return f"{text} {about_prefetch}" if about_prefetch else text


def _prefetch(share: float, record: Record) -> str | None:
    """A sentence about prefetch; None if the backend gathers nothing ahead."""
    strategy = strategy_of(record.backend.name)
    effective = record.backend.effective
    details = effective.details if effective else {}
    if strategy is None:
        return None
    if strategy.zero_stage == 3:
        ahead = effective.prefetch if effective else None
        if ahead in (None, "none") and record.world.preset == "like-for-like":
            return "Prefetch is off: the preset like-for-like sets max_live_parameters to 0."
        if ahead is None:
            return None
        return "Prefetch is off." if ahead == "none" else f"{_judge(share)} (in force: up to {ahead} ahead)."
    if not strategy.of_family.overlaps_on_streams:
        return None
    if record.world.device == "cpu":
        return (
            "What overlap or prefetch could hide cannot be measured on this machine: FSDP overlaps on "
            f"streams of a device, and the CPU has none{_settings(details)}."
        )
    if strategy.sharding == "none":
        return None
    if all(details.get(setting) in values for setting, values in OFF.items()):
        return f"Prefetch is off{_settings(details)}."
    return f"{_judge(share)}{_settings(details)}."


def _judge(share: float) -> str:
    if share >= MOSTLY:
        return "Prefetch works"
    return "Prefetch works partly" if share >= PARTLY else "Prefetch does not help"


def _settings(details: dict[str, Any]) -> str:
    """Prefetch settings in force, as the backend read them back."""
    known = [f"{name} {details[name]}" for name in PREFETCH_SETTINGS if name in details]
    return f" (in force: {', '.join(known)})" if known else ""


TITLE = "Overlap of computation and communication"
LONGEST_WAITS = 3
OVERLAP = table_columns("overlap")

TEXTS = {"cpu": prose("overlap_cpu"), "cuda": prose("overlap_cuda")}


def overlap_section(comparison: Comparison) -> Section | None:
    """One line per backend and rank, its median traced step of all repeats; None where none was traced."""
    groups = comparison.groups
    body = [line for group in groups for line in _lines(group)]
    missing = _missing(groups)
    if not body:
        return Section("overlap", TITLE, [missing]) if missing else None
    traced = [row.record for row in comparison.rows if any(rank.overlap for rank in row.record.ranks)]
    texts = [TEXTS[device] for device in dict.fromkeys(record.world.device for record in traced)]
    blocks: list[Block] = [Paragraph(text) for text in [*texts, prose("overlap_sum")]]
    marks = job_marks(groups)
    by_sentence: dict[tuple[str, str], list[CellName]] = {}
    for group in groups:
        if (sentence := overlap_sentence(group)) is not None:
            by_sentence.setdefault((marks[group.record.job_id], sentence), []).append(group.cell)
    if missing:
        blocks.append(missing)
    if by_sentence:
        items = [f"{name_cells(cells)}{job}: {sentence}" for (job, sentence), cells in by_sentence.items()]
        blocks.append(Items(items))
    blocks.append(Folded("Each rank", [Table(key="overlap", columns=OVERLAP, rows=body)]))
    waits = [line for group in groups if group.world_size > 1 for line in _waits(group)]
    if waits:
        table = Table(key="longest_waits", columns=table_columns("overlap_wait"), rows=waits)
        title = (
            f"The {LONGEST_WAITS} longest waits of each cell, over all its repeats, ranks and traced steps"
        )
        blocks.append(Folded(title, [table]))
    traces = [
        f"{row.record.run_id}/{artifact.path}"
        for row in comparison.rows
        for artifact in row.record.artifacts
        if artifact.kind == "trace"
    ]
    if traces:
        text = "Traces in the folder of the runs; open them at ui.perfetto.dev or in chrome://tracing."
        blocks.append(Folded("Traces", [Paragraph(text), Items(traces)]))
    return Section("overlap", TITLE, blocks)


def _missing(groups: Sequence[CellRuns]) -> Items | None:
    """Why a traced cell has no line."""
    cells: dict[str, list[CellName]] = {}
    for group in groups:
        for reason in {rank.overlap_missing for row in group.rows for rank in row.record.ranks} - {None}:
            cells.setdefault(str(reason), []).append(group.cell)
    items = [f"{name_cells(of_reason)}: n/a: {reason}." for reason, of_reason in cells.items()]
    return Items(items) if items else None


def hidden_share(parts: Sequence[OverlapPart]) -> float | None:
    """Share of the communication during which something computes; None without communication."""
    communication = sum(part.communication_seconds for part in parts)
    exposed = sum(part.exposed_seconds for part in parts)
    return 1 - exposed / communication if communication else None


def overlap_sentence(group: CellRuns) -> str | None:
    """How much of the communication is hidden, in words; None without communication with other ranks."""
    share = hidden_share([part for row in group.rows for rank in row.record.ranks for part in rank.overlap])
    return None if share is None or group.world_size == 1 else overlap_words(share, group.record)


def _lines(group: CellRuns) -> list[list[Any]]:
    parts: dict[int, list[OverlapPart]] = {}
    for row in group.rows:
        for rank in row.record.ranks:
            parts.setdefault(rank.rank, []).extend(rank.overlap)
    return [
        [*group.cell, rank, *_times(of_rank, alone=group.world_size == 1)]
        for rank, of_rank in parts.items()
        if of_rank
    ]


def _times(parts: Sequence[OverlapPart], *, alone: bool) -> list[Any]:
    """Of the median step; a single rank waits for nobody, so nothing can be hidden."""
    middle = median_step(parts)
    return [*row_of(OVERLAP[3:-1], middle), None if alone else hidden_share([middle])]


def _waits(group: CellRuns) -> list[list[Any]]:
    """The longest waits of a cell over its repeats, ranks and traced steps."""
    waits: list[list[Any]] = [
        [row.record.repeat, rank.rank, part.step, wait.phase, wait.name, wait.seconds]
        for row in group.rows
        for rank in row.record.ranks
        for part in rank.overlap
        for wait in part.waits
    ]
    waits.sort(key=lambda wait: -wait[-1])
    return [[*group.cell, *wait] for wait in waits[:LONGEST_WAITS]]
