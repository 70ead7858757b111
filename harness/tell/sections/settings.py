"""Settings in force that differ between runs of one job, and what a difference in them changes."""

from __future__ import annotations

from harness.judge.cell import name_cells
from harness.judge.comparison import Comparison
from harness.judge.effective import Effect
from harness.judge.wording import words
from harness.tell.document import Column, Paragraph, Section, Shown, Table
from harness.tell.tables import prose, table_columns

TITLE = "Settings in force that differ"
CHANGES: dict[Effect, str] = {"mathematics": "the mathematics", "cost": "cost only"}
COLUMNS = table_columns("settings")


def settings_section(comparison: Comparison) -> Section | None:
    """One line for each value; None where no setting differs."""
    found = comparison.settings
    if not found:
        return None
    jobs = list(dict.fromkeys(setting.job_id for setting in found))
    body = [
        [
            *([differing.job_id] if len(jobs) > 1 else []),
            differing.setting,
            Shown(differing.effect, CHANGES[differing.effect]),
            Shown(value.value if isinstance(value.value, int | float | str) else words(value.value),
                  words(value.value)),
            name_cells(value.cells),
        ]
        for differing in found
        for value in differing.values
    ]  # fmt: skip
    columns = (Column("job_id", "job", align="left"), *COLUMNS) if len(jobs) > 1 else COLUMNS
    table = Table(key="settings_in_force", columns=columns, rows=body)
    return Section("settings_in_force", TITLE, [Paragraph(prose("settings")), table])
