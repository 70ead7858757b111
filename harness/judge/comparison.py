"""Records compared with each other: rows, cells, findings and settings, each computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from harness.judge.agreement.noise import Noise, is_variant
from harness.judge.cell import CellName
from harness.judge.effective import SETTINGS, Effect, Setting
from harness.judge.findings.finders import find_all
from harness.judge.findings.finding import Finding
from harness.judge.metrics import OWN_STEP
from harness.judge.ranking import NO_FIGURES, Ranking, Ratio
from harness.judge.repeats import Place, Runs, rankings, repeat_spreads
from harness.judge.rows import JudgedRun, make_rows
from harness.judge.run_conditions import is_deterministic
from harness.record import Record
from harness.record.workload import samples_at_once

SHOWN = ("exact", "tight", "band")
"""Parities of a run that trains as its reference does."""
NAMES = frozenset(setting.name for setting in SETTINGS)


@dataclass(frozen=True, kw_only=True)
class SettingValue:
    """One value of a setting and the cells in which it is in force."""

    value: Any
    cells: tuple[CellName, ...]
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


def differing_settings(rows: Sequence[JudgedRun]) -> list[DifferingSetting]:
    """Of each job of comparable rows, what changes the mathematics first."""
    runs = [row for row in rows if row.record.status in ("ok", "diverged")]
    jobs: dict[str, list[JudgedRun]] = {}
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


def _known_of_pair(row: JudgedRun) -> list[DifferingSetting]:
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


def _values(setting: Setting, runs: Sequence[JudgedRun]) -> tuple[SettingValue, ...]:
    known: dict[str, tuple[Any, list[JudgedRun]]] = {}
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


class Comparison(Runs):
    """Runs judged by the references of their jobs; every part is computed on first use and kept."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__(make_rows(records))

    @classmethod
    def of_rows(cls, rows: Iterable[JudgedRun]) -> Self:
        """A part of another comparison, whose rows stay judged as they are."""
        part = cls(())
        part.rows = list(rows)
        return part

    @cached_property
    def comparable(self) -> Self:
        """The runs that may be compared with each other: those that are the same job as their reference."""
        rows = [row for row in self.rows if row.is_comparable]
        return self if len(rows) == len(self.rows) else self.of_rows(rows)

    @cached_property
    def not_comparable(self) -> Self:
        """The other runs."""
        return self.of_rows(row for row in self.rows if not row.is_comparable)

    @cached_property
    def by_job(self) -> dict[str, Self]:
        """The runs of each job, jobs in the order of the rows."""
        jobs: dict[str, list[JudgedRun]] = {}
        for row in self.rows:
            jobs.setdefault(row.record.job_id, []).append(row)
        if len(jobs) == 1:
            return dict.fromkeys(jobs, self)
        parts = {job_id: self.of_rows(rows) for job_id, rows in jobs.items()}
        for job_id, part in parts.items():
            # The same cells, so that their figures are not computed again.
            part.groups = [group for group in self.groups if group.record.job_id == job_id]
        return parts

    @cached_property
    def noises(self) -> dict[str, Noise]:
        """What counts as rounding, by job; jobs without a reference have none.

        Where a loss hangs on the split of the batch, also of each run of the reference with ranks' split.
        """
        return {_judged_by(row): row.noise for row in self.rows if row.noise is not None}

    @cached_property
    def rankings(self) -> dict[Place, Ranking]:
        """The order of the cells of each place by speed, as far as their runs support one."""
        return rankings(self.groups)

    @cached_property
    def own_rankings(self) -> dict[Place, Ranking]:
        """The same by the time without what others took from the ranks."""
        return rankings(self.groups, OWN_STEP)

    @cached_property
    def other_orders(self) -> list[tuple[CellName, str, Ratio, Ratio]]:
        """Cells whose order is another without what others took: the base, the ratio by wall time, the other.

        Where cells took turns, wall time is sharper: what only the other leaves open contradicts nothing.
        """
        found = []
        for place, order in self.rankings.items():
            own = self.own_rankings[place].to_base
            for label, wall in order.to_base.items():
                is_blunt = bool(order.turns.get(label)) and own[label].order == "open"
                if wall.extent and own[label].extent and own[label].order != wall.order and not is_blunt:
                    found.append((CellName(label, place[1]), order.base, wall, own[label]))
        return found

    @cached_property
    def sessions(self) -> int:
        """In how many sessions its timed runs were made."""
        return len({run.session for group in self.groups for run in group.runs if run.step_seconds})

    @cached_property
    def findings(self) -> list[Finding]:
        """Every finding, in the order of the catalogue."""
        return find_all(self)

    @cached_property
    def settings(self) -> list[DifferingSetting]:
        """Settings in force that differ between comparable runs of a job."""
        return differing_settings(self.comparable.rows)

    @cached_property
    def repeat_spreads(self) -> dict[str, float | None]:
        """How far repeats of a cell lie from each other."""
        return repeat_spreads(self.groups)

    def as_json(self) -> dict[str, Any]:
        """The document of `compare --json`."""
        ids = list(self.by_job)
        return {
            "job_id": ids[0] if len(ids) == 1 else None,
            "job_ids": ids,
            "rows": [
                row.as_json() | {"parity_run": self.parity_run(row)} | self._speed(row) for row in self.rows
            ],
            "not_comparable": [_not_comparable(row) for row in self.not_comparable.rows],
            "noise": {job_id: noise.as_json() for job_id, noise in self.noises.items()},
            "repeat_spreads": self.repeat_spreads,
            "settings": [setting.as_json() for setting in self.settings],
            "findings": [finding.as_json() for finding in self.findings],
        }

    @cached_property
    def _proofs(self) -> dict[tuple[str, str, int], str]:
        """By job, backend and ranks, the first deterministic run that trains as the reference does."""
        found: dict[tuple[str, str, int], str] = {}
        for row in self.comparable.rows:
            if is_deterministic(row.record) and row.judgement.parity in SHOWN:
                found.setdefault(_cell_of(row), row.record.run_id)
        return found

    def parity_run(self, row: JudgedRun) -> str | None:
        """The run that shows the parity of this one: another where its own kernels add in any order.

        Its own where there is no other; None where it is unjudged.
        """
        if row.judgement.parity == "unjudged":
            return None
        own = row.record.run_id
        return own if is_deterministic(row.record) else self._proofs.get(_cell_of(row), own)

    def _speed(self, row: JudgedRun) -> dict[str, Any]:
        """How the cell of a run compares in speed with the base of its place; nulls where it does not."""
        place = row.record.job_id, row.record.world.world_size, row.label_suffix
        order = self.comparable.rankings.get(place) if row.is_comparable else None
        return dict(NO_FIGURES) if order is None else order.figures(row.label)


def _cell_of(row: JudgedRun) -> tuple[str, str, int]:
    return row.record.job_id, row.backend, row.record.world.world_size


def _judged_by(row: JudgedRun) -> str:
    """The job, and of a reference in other parts than its own how many samples it takes at once."""
    reference = row.reference.record if row.reference is not None else None
    if reference is None or not is_variant(reference):
        return row.record.job_id
    return f"{row.record.job_id}, {samples_at_once(reference)} at once"


def _not_comparable(row: JudgedRun) -> dict[str, Any]:
    """A run that is not the job of the others: the run it was compared with, and each field that differs."""
    record, other = row.record, row.same_job_as
    return {
        "backend": row.label,
        "world_size": record.world.world_size,
        "repeat": record.repeat,
        "run_id": record.run_id,
        "beside": other.record.run_id if other is not None else None,
        "differences": [difference.as_json() for difference in row.judgement.not_same_job],
    }
