"""Settings in force that differ between runs of one job, and what a difference in them changes."""

from __future__ import annotations

from harness.judge.cell import name_cells
from harness.judge.comparison import Comparison
from harness.judge.effective import Effect
from harness.judge.wording import words
from harness.tell.document import Column, Paragraph, Section, Shown, Table

TITLE = "Settings in force that differ"
CHANGES: dict[Effect, str] = {"mathematics": "the mathematics", "cost": "cost only"}
COLUMNS = (
    Column("setting", "setting", align="left"),
    Column("changes", "changes", align="left"),
    Column("value", "value", align="left"),
    Column("backends", "in force for", align="left"),
)
TEXT = (
    "What ran, as the harness saw it or the backend read it back from its library. changes: 'the "
    "mathematics' is what a loss may depend on, if only by rounding: the parity levels say whether it does "
    "here; 'cost only' is speed, memory or communication. The reference's value comes first. A run of which "
    "a setting is not known is left out of its lines; settings that do not differ are under 'Configuration "
    "of each backend'."
)


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
    return Section("settings_in_force", TITLE, [Paragraph(TEXT), table])
