"""Records compared with each other: rows, cells, findings and settings, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Self

from harness.judge.agreement.parity import Noise, is_variant
from harness.judge.effective import SETTINGS, Effect, Setting
from harness.judge.facts import STEP
from harness.judge.findings import amounts, execution, jobs, timing, training
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import (
    CellRuns,
    JudgedRun,
    Place,
    Runs,
    group_repeats,
    make_rows,
    rankings,
    repeat_spreads,
)
from harness.judge.run_conditions import is_deterministic, labelled, varying, words
from harness.judge.statistics import NO_FIGURES, Ranking, Ratio, ratios, shared_logs
from harness.judge.wording import CellName, counted, entries
from harness.nested import grouped
from harness.record import Record, WorldPart
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
    """Settings that differ between comparable rows of a job, those that change the mathematics first."""
    runs = [row for row in rows if row.record.status in ("ok", "diverged")]
    by_job = grouped((row.record.job_id, row) for row in runs)
    found = [
        DifferingSetting(job_id=job_id, setting=setting.name, effect=setting.effect, values=values)
        for job_id, of_job in by_job.items()
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
        value = setting.of(row.record)
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
        return self.of_rows(row for row in self.rows if not row.is_comparable)

    @cached_property
    def by_job(self) -> dict[str, Self]:
        """The runs of each job, jobs in the order of the rows."""
        by_job = grouped((row.record.job_id, row) for row in self.rows)
        if len(by_job) == 1:
            return dict.fromkeys(by_job, self)
        parts = {job_id: self.of_rows(rows) for job_id, rows in by_job.items()}
        for job_id, part in parts.items():
            # The same cells, so that their figures are not computed again.
            part.groups = [group for group in self.groups if group.record.job_id == job_id]
        return parts

    @cached_property
    def noises(self) -> dict[str, Noise]:
        """What counts as rounding, by job; jobs without a reference have none.

        Where a loss hangs on the split of the batch, also of each run of the reference with ranks' split.
        """
        found: dict[str, Noise] = {}
        for row in self.rows:
            if row.noise is not None and row.reference is not None:
                cut = is_variant(row.reference.record)
                suffix = f", {samples_at_once(row.reference.record)} at once" if cut else ""
                found[f"{row.record.job_id}{suffix}"] = row.noise
        return found

    @cached_property
    def rankings(self) -> dict[Place, Ranking]:
        """The order of the cells of each place by speed, as far as their runs support one."""
        return rankings(self.groups)

    @cached_property
    def sessions(self) -> int:
        return len({run.session for group in self.groups for run in group.runs if run.step_seconds})

    @cached_property
    def findings(self) -> list[Finding]:
        """Every finding, in the order of the catalogue."""
        told: list[Finding] = []
        for rules in (one.RULES for one in (jobs, execution, training, amounts, timing)):
            told += [finding for rule in rules.of_runs for row in self.rows for finding in rule(row)]
            told += [finding for rule in rules.of_cells for finding in of_cells(self, rule)]
            told += [finding for look in rules.of_all for finding in look(self)]
        order = {kind: place for place, kind in enumerate(entries())}
        return sorted(told, key=lambda finding: order[finding.id])

    @cached_property
    def settings(self) -> list[DifferingSetting]:
        """Settings in force that differ between comparable runs of a job."""
        return differing_settings(self.comparable.rows)

    @cached_property
    def repeat_spreads(self) -> dict[str, float | None]:
        return repeat_spreads(self.groups)

    def as_json(self) -> dict[str, Any]:
        ids, findings = list(self.by_job), [finding.as_json() for finding in self.findings]
        return {
            "job_id": ids[0] if len(ids) == 1 else None,
            "job_ids": ids,
            "rows": [
                row.as_json() | {"parity_run": self.parity_run(row)} | self._speed(row) for row in self.rows
            ],
            "not_comparable": [
                {
                    "backend": row.label,
                    "world_size": row.record.world.world_size,
                    "repeat": row.record.repeat,
                    "run_id": row.record.run_id,
                    "beside": row.same_job_as.record.run_id if row.same_job_as is not None else None,
                    "differences": [difference.as_json() for difference in row.judgement.not_same_job],
                }
                for row in self.not_comparable.rows
            ],
            "noise": {job_id: noise.as_json() for job_id, noise in self.noises.items()},
            "repeat_spreads": self.repeat_spreads,
            "settings": [setting.as_json() for setting in self.settings],
            "findings": findings,
        }

    @cached_property
    def _proofs(self) -> dict[tuple[str, str, int], str]:
        """First deterministic run that trains as the reference does, by job, backend and ranks."""
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


GROWING = ("job", "nodes", "micro-batch")
"""Run conditions that may change along one curve. On the CPU the threads of a rank may not: two ranks of one
thread have no more processors than one of two."""
LAYOUTS: tuple[Callable[[WorldPart], str], ...] = (
    lambda world: counted(world.nodes, "node"),
    lambda world: f"micro-batch {world.micro_batch_size}",
)
"""What may change along a curve, in words: one number of ranks in several layouts has a curve of each."""
CUT = {"global_batch_size", "micro_batch_size", "accumulation_steps"}
"""Settings that weak scaling changes with the number of ranks; the model may grow too."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One number of ranks of one backend, compared with the smallest that was run."""

    group: CellRuns
    base: CellRuns
    curve: str
    """Name of the curve that it lies on: the backend, and how it differs from its other curves."""
    ratio: Ratio = field(default_factory=lambda: Ratio(rounds=0))
    """Speed of a step over that of the base in the same rounds; asked together with all other points."""

    @property
    def step_seconds(self) -> float:
        """Mean timed step of the median run, in seconds: tokens of a step over tokens per second."""
        return _step(self.group)

    @property
    def training_seconds(self) -> float:
        """The timed step times the steps of the job: without set-up and evaluations."""
        return self.step_seconds * len(self.group.record.steps)

    @property
    def speed_up(self) -> float:
        """T(N0) / T(N) of a step in the same rounds; of runs that share none, of their medians.

        With equal work also called scale factor.
        """
        return self.ratio.middle or _step(self.base) / self.step_seconds

    @property
    def strong_efficiency(self) -> float:
        """Speed-up over the ratio of ranks: 1 is ideal."""
        return self.speed_up / (self.group.world_size / self.base.world_size)

    @property
    def weak_efficiency(self) -> float:
        """T(N0) / T(N) of equal work per rank: 1 is ideal, below it ranks cost time."""
        return self.speed_up

    @property
    def work_ratio(self) -> float | None:
        """Parameters x tokens per rank over that of the base: 1 in true weak scaling; None: unknown."""
        here, there = _work(self.group), _work(self.base)
        return here / there if here is not None and there else None


def strong_scaling(comparison: Comparison) -> list[list[ScalingPoint]]:
    """Backends that ran one job on several numbers of ranks, each from its smallest on.

    Where one number of ranks ran in several layouts, each layout has a curve of its own. Runs that are not
    the same job are left out. Where a backend was not run on one rank, the reference on one process of the
    same job is its base, unless jobs grow with the ranks: then only weak scaling is asked for.
    """
    timed = _timed(comparison.comparable.groups)
    names = _separating(timed)
    of_job = [(group, (group.record.job_id, words(group.record, names))) for group in timed]
    references = grouped((job, group) for group, job in of_job if group.is_reference)
    curves = grouped(((job, group.backend), group) for group, job in of_job if not group.is_reference)
    found = []
    grows = bool(weak_scaling(comparison))
    for (job, label), groups in curves.items():
        if min(group.world_size for group in groups) > 1 and not grows:
            groups = [*references.get(job, [])[:1], *groups]
        if len({group.world_size for group in groups}) > 1:
            found += _curves(groups, label, job[1])
    return _compared(found)


def weak_scaling(comparison: Comparison) -> list[list[ScalingPoint]]:
    """Backends whose jobs grow with the number of ranks and are otherwise the same.

    The batch, the model or both may grow: the job with more ranks must be another one. Runs that are not
    what their own job says are left out.
    """
    own = [row for row in comparison.rows if row.is_comparable or row.is_of_another_job]
    timed = _timed(group_repeats(own))
    names = _separating(timed)
    growing = {"model": {"config", "name"}, "training": CUT}
    curves = grouped(
        ((of.record.job.model_dump_json(exclude=growing), of.backend, words(of.record, names)), of)
        for of in timed
        if not of.is_reference
    )
    found = []
    for (_, label, conditions), groups in curves.items():
        sizes = {group.world_size for group in groups}
        job_ids = {group.record.job_id for group in groups}
        pairs = {(group.world_size, group.record.job_id) for group in groups}
        if len(sizes) > 1 and len(sizes) == len(job_ids) == len(pairs):
            found += _curves(groups, label, conditions)
    return _compared(found)


def _compared(curves: list[list[ScalingPoint]]) -> list[list[ScalingPoint]]:
    """Each point with its speed over that of its base, round by round."""
    every = {(number, point.group.key): point for number, curve in enumerate(curves) for point in curve}
    asked = {
        key: shared_logs(point.group.rounds(STEP), point.base.rounds(STEP))
        for key, point in every.items()
        if point.group is not point.base
    }
    found = ratios(asked)
    return [
        [replace(point, ratio=found.get((number, point.group.key), point.ratio)) for point in curve]
        for number, curve in enumerate(curves)
    ]


def _timed(groups: Sequence[CellRuns]) -> list[CellRuns]:
    """Successful and timed; those that diverged do other work."""
    return [g for g in groups if g.has_result and g.values(STEP) and g.parity != "diverged"]


def _separating(groups: Sequence[CellRuns]) -> list[str]:
    """Names of the run conditions that put runs on different curves."""
    harmless = () if any(group.record.world.device == "cpu" for group in groups) else ("threads",)
    names = varying(group.record for group in groups)
    return [name for name in names if name not in (*GROWING, *harmless)]


def _curves(groups: Sequence[CellRuns], label: str, conditions: str) -> list[list[ScalingPoint]]:
    """One curve, or one for each layout where one number of ranks ran in several.

    All of them begin at the fewest ranks on the fewest nodes.
    """
    ordered = sorted(groups, key=lambda group: (group.world_size, group.record.world.nodes))
    base = ordered[0]
    sizes = {group.world_size for group in groups}
    telling = [
        layout
        for layout in LAYOUTS
        if len({(group.world_size, layout(group.record.world)) for group in groups}) > len(sizes)
    ]
    layouts = grouped(
        (", ".join(layout(group.record.world) for layout in telling), group) for group in ordered
    )
    curves = []
    for shown, members in layouts.items():
        if len(members) == 1 and members[0] is base:
            continue
        name = labelled(label, ", ".join(filter(None, (conditions, shown))))
        starts = [base] if members[0].world_size > base.world_size else []
        curves.append([ScalingPoint(group=group, base=base, curve=name) for group in [*starts, *members]])
    return curves


def _step(group: CellRuns) -> float:
    return median(group.values(STEP))


def _work(group: CellRuns) -> float | None:
    record = group.record
    tokens = record.steps[-1].tokens if record.steps else None
    if record.initial_weights is None or tokens is None:
        return None
    return record.initial_weights.parameter_count * tokens / group.world_size
