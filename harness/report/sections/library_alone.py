"""What a library that runs the loop would do without the job's batches, loss and updates."""

from __future__ import annotations

from harness.backends.trainer.alone import LIBRARY_ALONE
from harness.judge.cell import Cell, name_cells
from harness.judge.comparison import Comparison
from harness.report.document import Column, Paragraph, Section, Table

TITLE = "What Trainer does alone"
COLUMNS = (
    Column("subject", "subject", align="left"),
    Column("alone", "Trainer alone", align="left"),
    Column("backends", "read from", align="left"),
)
TEXT = (
    "Trainer's loop ran with the job's batches, loss, optimizer, clipping and learning rates, as all rows "
    "did. A script that leaves these to Trainer gets what is listed here; where it differs, the job differs."
)


def library_alone_section(comparison: Comparison) -> Section | None:
    """One line for each subject and value; None where no library ran the loop."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for group in comparison.groups:
        effective = group.record.backend.effective
        subjects = effective.details.get(LIBRARY_ALONE, {}) if effective is not None else {}
        for subject, value in subjects.items():
            found.setdefault(subject, {}).setdefault(value, []).append(group.cell)
    body = [
        [subject, value, name_cells(cells)]
        for subject, values in found.items()
        for value, cells in values.items()
    ]
    if not body:
        return None
    return Section(
        "library_alone", TITLE, [Paragraph(TEXT), Table(key="library_alone", columns=COLUMNS, rows=body)]
    )
