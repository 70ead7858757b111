"""Which preset ran, and what it changed of each library's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from harness.backends import registry
from harness.backends.base import Preset
from harness.backends.presets import BESIDE_ZERO_OPTIMIZATION, Change, preset_changes
from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.judge.wording import listed
from harness.record import Record
from harness.report.document import Column, Paragraph, Section, Table

LIKE_FOR_LIKE, LIBRARY_DEFAULTS = get_args(Preset)

COLUMNS = (
    Column("setting", "setting", align="left"),
    Column("value", "value", align="left"),
    Column("default", "library's default", align="left"),
    Column("reason", "why", align="left"),
    Column("backends", "backends", align="left"),
)


def presets_section(comparison: Comparison) -> Section | None:
    """The changes, each once with its backends; None without a run that was set up."""
    ran = [row.record for row in comparison.rows if row.record.backend.effective]
    if not ran:
        return None
    backends: dict[tuple[str, ...], list[str]] = {}
    for group in comparison.groups:
        for change in _changes(group):
            changed = backends.setdefault(change, [])
            if group.backend not in changed:
                changed.append(group.backend)
    text = _in_force(ran)
    if any(record.world.preset == LIBRARY_DEFAULTS for record in ran):
        text += f" {LIBRARY_DEFAULTS} keeps a library's settings, except those that change the mathematics."
    if not backends:
        return Section("preset", "Preset", [Paragraph(text)])
    lines = [[*change, "; ".join(changed)] for change, changed in backends.items()]
    table = Table(key="preset_changes", columns=COLUMNS, rows=lines)
    return Section("preset", "Preset", [Paragraph(f"{text} What {LIKE_FOR_LIKE} changed:"), table])


def _in_force(ran: Sequence[Record]) -> str:
    """'Preset: like-for-like; library-defaults for zero3:preset=library-defaults.'"""
    common = dict.fromkeys(r.world.preset for r in ran if r.backend.own_preset is None)
    own: dict[str, dict[str, None]] = {}
    for record in ran:
        if record.backend.own_preset is not None:
            own.setdefault(record.world.preset, {})[record.backend.label] = None
    parts = [", ".join(common)] if common else []
    parts += [f"{preset} for {listed(list(labels))}" for preset, labels in own.items()]
    return f"Preset: {'; '.join(parts)}."


def _changes(group: Repeats) -> list[tuple[str, ...]]:
    """Setting, value, the library's default and the reason of each."""
    record = group.record
    effective, strategy = record.backend.effective, registry.strategy_of(record.backend.name)
    if effective is None or strategy is None:
        return []
    changes = preset_changes(
        strategy,
        record.job.training.held_precision,
        record.world.preset,  # type: ignore[arg-type]
        effective.parameter_count,
    )
    return [
        (change.setting, str(change.value), str(change.default), change.reason)
        for change in changes
        if record.backend.options.get(change.setting) is None  # an option given by hand wins
        and _was_set(change, record)
    ]


def _was_set(change: Change, record: Record) -> bool:
    """Whether the configuration of the run has it: a preset may have changed less when a record was made."""
    config = record.backend.native_config
    return not config or change.setting not in BESIDE_ZERO_OPTIMIZATION or change.setting in config
