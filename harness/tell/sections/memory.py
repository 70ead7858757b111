"""Memory by moment and kind, of processes and devices, model states, and predicted peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from harness.forms.terms import STATE_KINDS
from harness.judge.comparison import Comparison
from harness.judge.quantities import measures
from harness.judge.quantities.model_states import largest, rank_states, textbook
from harness.judge.repeats import CellRuns
from harness.record import MemoryPart, Record
from harness.tell.document import Block, Column, Folded, Paragraph, Section, Table
from harness.tell.formats import megabytes, percent
from harness.tell.tables import LABELS, prose, table_columns


def fragmentation_bytes(moment: MemoryPart) -> int | None:
    """What the caching allocator holds of the device and nobody uses or waits for."""
    used = moment.allocated_bytes if moment.active_bytes is None else moment.active_bytes
    return None if moment.reserved_bytes is None or used is None else moment.reserved_bytes - used


FIGURES: tuple[tuple[str, str, str, Callable[[MemoryPart], int | None]], ...] = (
    (
        "active_peak",
        "active",
        "allocated, and freed while another stream may still use it: the most in use at once",
        lambda m: m.active_peak_bytes,
    ),
    (
        "reserved",
        "reserved",
        "device memory that the caching allocator holds",
        lambda m: _most(m.reserved_bytes, m.reserved_peak_bytes),
    ),
    ("fragmentation", "fragmented", "reserved, but not active at that moment", fragmentation_bytes),
    (
        "device_used",
        "driver",
        "device memory in use as the driver counts it, context and NCCL included; an allocation fails where "
        "it would exceed the device's memory",
        lambda m: m.device_used_bytes,
    ),
    ("pinned", "pinned", "page-locked host memory that torch allocated", lambda m: m.pinned_bytes),
    ("file", "files", "into which states are swapped", lambda m: m.file_bytes),
    (
        "host_resident",
        "resident",
        "the process's resident set on the host, libraries included",
        lambda m: m.host_resident_bytes,
    ),
)
"""Key, title, meaning and value at one moment."""


def _most(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def process_memory_blocks(comparison: Comparison) -> list[Block]:
    """A table of those figures that any record has, and why the driver's is missing; [] without any."""
    groups = comparison.groups
    records = [group.record for group in groups]
    known = [figure for figure in FIGURES if any(_by_rank(record, figure[3]) for record in records)]
    if not known:
        return []
    columns = [*LABELS]
    for key, title, _, _ in known:
        columns.append(Column(f"least_{key}_bytes", f"{title} MB, least", megabytes))
        columns.append(Column(f"most_{key}_bytes", f"{title} MB, most", megabytes))
    body: list[list[Any]] = []
    for group in groups:
        line: list[Any] = [*group.cell]
        for _, _, _, value in known:
            sizes = _by_rank(group.record, value)
            line += [min(sizes, default=None), max(sizes, default=None)]
        if any(size is not None for size in line[2:]):
            body.append(line)
    meanings = "; ".join(f"{title}: {meaning}" for _, title, meaning, _ in known)
    text = (
        "Beyond live tensors. Of each rank the largest figure over all moments recorded; least and most: on "
        f"the rank where that is smallest and largest. {meanings}."
    )
    unknown = _unknown(records)
    return [
        Paragraph(text),
        Table(key="process_memory", columns=columns, rows=body),
        *([Paragraph(f"{_whose(records)}: {'; '.join(unknown)}.")] if unknown else []),
    ]


def _by_rank(record: Record, value: Callable[[MemoryPart], int | None]) -> list[int]:
    """The largest over a rank's moments, of each rank that has any."""
    found = ([size for m in part.memory if (size := value(m)) is not None] for part in record.ranks)
    return [max(sizes) for sizes in found if sizes]


def _moments(records: Sequence[Record]) -> Iterator[MemoryPart]:
    return (moment for record in records for part in record.ranks for moment in part.memory)


def _whose(records: Sequence[Record]) -> str:
    if any(moment.device_used_of == "device" for moment in _moments(records)):
        return "The driver's figure is that of all programs on the device, not of the process alone"
    return "The driver's figure is not known"


def _unknown(records: Sequence[Record]) -> list[str]:
    """Reasons, each once."""
    return sorted({m.device_used_unknown for m in _moments(records) if m.device_used_unknown})


KINDS = (
    "weights", "gathered", "gradients", "masters", "optimizer", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip
MOMENTS = {
    "after_setup": "after setup",
    "after_forward": "after forward",
    "after_backward": "after backward",
    "after_step": "after step",
    "during_evaluation": "evaluation",
    "during_checkpoint": "checkpoint",
    "during_checkpoint_load": "checkpoint loaded",
}


def memory_section(comparison: Comparison) -> Section | None:
    """Live bytes by kind after the backward pass, and at the others; None if nothing was counted."""
    after_backward: list[list[Any]] = []
    others: list[list[Any]] = []
    for group in comparison.groups:
        head = group.cell
        for moment, title in MOMENTS.items():
            line = _line(group.record, moment)
            if line is not None:
                if moment == "after_backward":
                    after_backward.append([*head, *line])
                else:
                    others.append([*head, title, *line])
    if not others and not after_backward:
        return None
    columns = [
        *(Column(f"{kind}_bytes", f"{kind} MB", megabytes) for kind in KINDS),
        Column("least_allocated_bytes", "least MB", megabytes),
        Column("most_allocated_bytes", "most MB", megabytes),
        Column("peak_bytes", "peak MB", megabytes),
    ]
    table = _table("memory_after_backward", [*LABELS, *columns], after_backward)
    moments = _table(
        "memory_by_moment", [*LABELS, Column("moment", "moment", align="left"), *columns], others
    )
    blocks: list[Block] = [
        Paragraph(prose("memory")),
        table,
        *([Folded("Memory at the other moments", [moments])] if others else []),
        *process_memory_blocks(comparison),
    ]
    return Section("memory", "Memory after the backward pass, by kind", blocks)


def _table(key: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
    """Without the kinds that hold nothing in any line."""
    kinds = {f"{kind}_bytes" for kind in KINDS}
    kept = [
        index
        for index, column in enumerate(columns)
        if column.key not in kinds or any(row[index] != 0 for row in rows)
    ]
    return Table(
        key=key, columns=[columns[index] for index in kept], rows=[[row[i] for i in kept] for row in rows]
    )


def _line(record: Record, moment: str) -> list[int | None] | None:
    """Kinds of the largest rank, then least, most and peak over the ranks; None: not measured."""
    parts = measures.memory_at(record, moment)
    if not parts:
        return None
    kinds = measures.kinds_at(record, moment)
    allocated = [part.allocated_bytes for part in parts if part.allocated_bytes is not None]
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    sizes: list[int | None] = [kinds.get(kind, 0) if kinds else None for kind in KINDS]
    return [
        *sizes,
        min(allocated, default=None),
        max(allocated, default=None),
        max(peaks, default=None),
    ]


COLUMNS = table_columns("memory")
KIND = [column.key for column in COLUMNS].index("kind")
ALL = "all"
"""The kind of the line that sums up the others."""


def states_section(comparison: Comparison) -> Section | None:
    """A table of kinds and one of terms; None where no model states were measured."""
    kinds: list[list[Any]] = []
    terms: list[list[Any]] = []
    for group in comparison.groups:
        kinds += _kinds(group)
        terms += _terms(group)
    if not kinds:
        return None
    totals = [[*line[:KIND], *line[KIND + 1 :]] for line in kinds if line[KIND] == ALL]
    table = Table(key="model_state_totals", columns=[*COLUMNS[:KIND], *COLUMNS[KIND + 1 :]], rows=totals)
    by_kind = Table(key="model_states", columns=COLUMNS, rows=[line for line in kinds if line[KIND] != ALL])
    by_term = Table(key="model_state_terms", columns=table_columns("memory_term"), rows=terms)
    blocks: list[Block] = [
        Paragraph(prose("memory_states")),
        table,
        Folded("Weights, gradients, masters and optimizer states separately", [by_kind]),
        *([Folded("Terms of the closed forms", [by_term])] if terms else []),
    ]
    return Section("model_states", "Model states: measured, expected, textbook", blocks)


def _kinds(group: CellRuns) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None:
        return []
    expected = held.expected.kinds() if held.expected else None
    book = textbook(group.record)
    lines = []
    for kind in STATE_KINDS:
        measured = held.measured.get(kind, 0)
        form = expected.get(kind, 0) if expected is not None else None
        counted = book[kind] if book is not None else None
        if measured or form or counted:
            off = None if form is None else measured - form
            lines.append([*group.cell, kind, measured, form, off, counted])
    total = held.expected.model_state_bytes if held.expected else None
    off = None if total is None else held.measured_bytes - total
    by_the_book = sum(book.values()) if book is not None else None
    return [*lines, [*group.cell, ALL, held.measured_bytes, total, off, by_the_book]]


def _terms(group: CellRuns) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None or held.expected is None:
        return []
    return [
        [*group.cell, term.kind, term.name, term.bytes, "host" if term.host else "device"]
        for term in held.expected.terms
    ] + [[*group.cell, term.kind, term.name, term.bytes, "files"] for term in held.expected.files]


def prediction_section(comparison: Comparison) -> Section | None:
    """The error of every prediction that a measurement belongs to; None without any."""
    lines: list[list[Any]] = []
    errors = []
    for group in comparison.groups:
        predicted, measured = group.figures["predicted_peak_bytes"], group.figures["peak_bytes"]
        if group.record.prediction is None or predicted is None or not measured:
            continue
        error = predicted / measured - 1
        errors.append(abs(error))
        lines.append([*group.cell, predicted, measured, error, group.record.prediction.moment])
    if not errors:
        return None
    text = prose("prediction", mean=percent(mean(errors)), worst=percent(max(errors)))
    table = Table(key="predictions", columns=table_columns("memory_prediction"), rows=lines)
    return Section("prediction", "Predicted memory", [Paragraph(text), table])
