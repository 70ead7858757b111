"""Settings in which runs of one job differ, harmless or not: each value with its backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.compare.cell import Cell
from harness.compare.effective import SETTINGS, Effect, Setting
from harness.compare.rows import Row

NAMES = frozenset(setting.name for setting in SETTINGS)


@dataclass(frozen=True, kw_only=True)
class SettingValue:
    """One value of a setting and the cells in which it is in force."""

    value: Any
    cells: tuple[Cell, ...]
    """Each once, in the order of the rows."""
    is_of_reference: bool


@dataclass(frozen=True, kw_only=True)
class DifferingSetting:
    """A setting with more than one value within a job; runs of which it is not known are left out."""

    job_id: str
    setting: str
    effect: Effect
    values: tuple[SettingValue, ...]
    """The reference's first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "setting": self.setting,
            "changes": self.effect,
            "values": [
                {
                    "value": value.value,
                    "cells": [{"backend": cell.label, "world_size": cell.world_size} for cell in value.cells],
                    "is_of_reference": value.is_of_reference,
                }
                for value in self.values
            ],
        }


def differing_settings(rows: Sequence[Row]) -> list[DifferingSetting]:
    """Of each job of comparable rows, what changes the mathematics first."""
    runs = [row for row in rows if row.record.status in ("ok", "diverged")]
    jobs: dict[str, list[Row]] = {}
    for row in runs:
        jobs.setdefault(row.record.job_id, []).append(row)
    found = [
        DifferingSetting(job_id=job_id, setting=setting.name, effect=setting.effect, values=values)
        for job_id, of_job in jobs.items()
        for setting in SETTINGS
        if len(values := _values(setting, of_job)) > 1
    ]
    found += [differing for row in runs for differing in _known_of_pair(row)]
    return sorted(found, key=lambda differing: differing.effect != "mathematics")


def _known_of_pair(row: Row) -> list[DifferingSetting]:
    """Settings known only of a run and its reference, such as constants by parameter."""
    if row.reference is None:
        return []
    return [
        DifferingSetting(
            job_id=row.record.job_id,
            setting=difference.setting,
            effect=difference.effect,
            values=tuple(
                SettingValue(value=value, cells=(run.cell,), is_of_reference=run is row.reference)
                for value, run in ((difference.reference, row.reference), (difference.given, row.run))
            ),
        )
        for difference in row.judgement.settings
        if difference.setting not in NAMES
    ]


def _values(setting: Setting, runs: Sequence[Row]) -> tuple[SettingValue, ...]:
    known: dict[str, tuple[Any, list[Row]]] = {}
    for row in runs:
        value = setting.read(row.record)
        if value is not None:
            known.setdefault(repr(value), (value, []))[1].append(row)
    values = [
        SettingValue(
            value=value,
            cells=tuple(dict.fromkeys(row.cell for row in of_value)),
            is_of_reference=any(row.is_reference for row in of_value),
        )
        for value, of_value in known.values()
    ]
    return tuple(sorted(values, key=lambda value: not value.is_of_reference))
