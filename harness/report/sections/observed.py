"""Scripts that were observed: what they ran on, and which figures of a run of the harness they lack."""

from __future__ import annotations

import shlex

from harness.judge.comparison import Comparison
from harness.record import ObservationPart
from harness.report.document import Block, Column, Paragraph, Section, Table

TEXT = (
    "Rows of training scripts that `harness observe` measured from inside. Their figures have the meaning of "
    "those of the harness's own runs, but for these."
)
COLUMNS = (
    Column("backend", "row", align="left"),
    Column("field", "n/a in the record", align="left"),
    Column("reason", "why", align="left"),
)
EVERY = "all"


def observed_section(comparison: Comparison) -> Section | None:
    """None where no row is of a script."""
    seen = {
        row.backend: row.record.observation for row in comparison.rows if row.record.observation is not None
    }
    if not seen:
        return None
    blocks: list[Block] = [Paragraph(TEXT)]
    blocks += [Paragraph(_summary(label, part)) for label, part in seen.items()]
    blocks.append(Table(key="observed", columns=COLUMNS, rows=_missing(seen)))
    return Section("observed", "Observed scripts", blocks)


def _summary(label: str, part: ObservationPart) -> str:
    """'observed-ddp: `torchrun train.py`. Driven by lightning. Loss: ... . 2 optimizers step...'."""
    drivers = f" Driven by {', '.join(part.frameworks)}." if part.frameworks else ""
    loss = f" Loss: {part.loss}." if part.loss else ""
    same = f" Backend of the same strategy: {part.base}." if part.base else ""
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in part.notes)
    return f"{label}: `{shlex.join(part.command)}`.{drivers}{same}{loss}{notes}"


def _missing(seen: dict[str, ObservationPart]) -> list[list[str]]:
    """What all rows lack in one line each, then what some do."""
    fields = {(field, reason): None for part in seen.values() for field, reason in part.unknown.items()}
    lines = []
    for field, reason in fields:
        rows = [label for label, part in seen.items() if part.unknown.get(field) == reason]
        shown = [EVERY] if len(rows) == len(seen) else rows
        lines += [[row, field, reason] for row in shown]
    return lines
