"""Which preset ran, and what it changed of each library's defaults."""

from __future__ import annotations

from harness.backends import registry
from harness.backends.presets import preset_changes
from harness.compare.comparison import Comparison
from harness.compare.repeats import Repeats
from harness.report.document import Column, Paragraph, Section, Table

COLUMNS = (
    Column("setting", "setting", align="left"),
    Column("value", "value", align="left"),
    Column("default", "library's default", align="left"),
    Column("reason", "why", align="left"),
    Column("backends", "backends", align="left"),
)


def presets_section(comparison: Comparison) -> Section | None:
    """The changes, each once with its backends; None without a run that was set up."""
    presets = list(
        dict.fromkeys(row.record.world.preset for row in comparison.rows if row.record.backend.effective)
    )
    if not presets:
        return None
    backends: dict[tuple[str, ...], list[str]] = {}
    for group in comparison.groups:
        for change in _changes(group):
            changed = backends.setdefault(change, [])
            if group.backend not in changed:
                changed.append(group.backend)
    text = f"Preset: {', '.join(presets)}."
    if not backends:
        text += " It keeps each library's own settings, except those that change the mathematics."
        return Section("preset", "Preset", [Paragraph(text)])
    lines = [[*change, "; ".join(changed)] for change, changed in backends.items()]
    table = Table(key="preset_changes", columns=COLUMNS, rows=lines)
    return Section("preset", "Preset", [Paragraph(text + " What it changed:"), table])


def _changes(group: Repeats) -> list[tuple[str, ...]]:
    """Setting, value, the library's default and the reason of each."""
    record = group.record
    effective, strategy = record.backend.effective, registry.strategy_of(record.backend.name)
    if effective is None or strategy is None:
        return []
    changes = preset_changes(
        strategy,
        record.job.training.precision,
        record.world.preset,  # type: ignore[arg-type]
        effective.parameter_count,
    )
    return [
        (change.setting, str(change.value), str(change.default), change.reason)
        for change in changes
        if record.backend.options.get(change.setting) is None  # an option given by hand wins
    ]
