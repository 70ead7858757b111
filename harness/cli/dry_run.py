"""`compare --dry-run`: what it would run, why, for how long, and whether that fits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from harness.backends import registry
from harness.backends.base import World
from harness.cli.matrix import predict_unchecked, show
from harness.cli.output import View, echo
from harness.cli.progress import duration
from harness.job.experiment import Experiment
from harness.judge.wording import a_few
from harness.launch.cells import BOTH_KERNELS, have_both_kernels, is_refused
from harness.nested import differences
from harness.plan.preflight import ASSUMED, assumed_time
from harness.plan.scenario import why_not_planned
from harness.record import Record
from harness.record.provenance import package_versions
from harness.run_directory.request import RunRequest
from harness.tell.formats import fitted

if TYPE_CHECKING:
    from harness.plan.preflight import CellPredictions

Runs = Sequence[tuple[Path, Record]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cell before it runs."""

    cell: RunRequest
    why: str
    """Why there is no record, or which one."""
    record: Record | None = None
    """The record that would be used."""
    seconds: float | None = None
    """How long it would run; None: not known."""
    seconds_from: Literal["runs", "flops"] | None = None
    """Like runs of this folder, or the model's FLOPs over an assumed rate."""
    runs: bool = True
    """Whether ranks would start if there is no record: not where the strategy cannot run this job."""


def show_plan(
    cells: Sequence[RunRequest],
    known: Mapping[str, Record],
    found: Runs,
    device: str,
    experiment: Experiment,
    *,
    force: bool,
    as_json: bool,
    view: View,
) -> int:
    """Show what `harness compare` would do with these cells, and whether they fit, and do nothing.

    `known`: the records that would be used, by cell; `found`: all of the folder.
    """
    plans = [_planned(cell, known.get(cell.key), found, device) for cell in cells]
    missing = [plan for plan in plans if plan.record is None and plan.runs]
    view.begin("predicting memory")
    limit = experiment.runtime.memory_limit
    predicted = predict_unchecked([plan.cell for plan in missing], device, limit, force=force)
    missing = [plan for plan in missing if predicted.refusal(plan.cell.key) is None]
    if as_json:
        echo(json.dumps({"cells": [_document(plan, predicted) for plan in plans]}, indent=1))
        return 0
    headers = ("backend", "ranks", "repeat", "time", "record")
    both = have_both_kernels(cells)
    rows = [
        [
            _labelled(plan.cell) if both else plan.cell.backend,
            str(plan.cell.world_size), str(plan.cell.repeat),
            _time(plan), plan.why,
        ]
        for plan in plans
    ]  # fmt: skip
    echo(fitted(rows, headers, wide=view.wide))
    echo(_summary(missing, len(plans)), err=True)
    if both:
        echo(BOTH_KERNELS, err=True)
    show(predicted)
    if any(plan.seconds_from == "flops" for plan in missing):
        echo(ASSUMED, err=True)
    return 0


def _labelled(cell: RunRequest) -> str:
    """The backend of one of two cells that are alike but for their kernels."""
    return f"{cell.backend} (deterministic)" if cell.job.training.deterministic else cell.backend


def _time(plan: Plan) -> str:
    if plan.seconds is None or plan.record:
        return "-"
    return ("~" if plan.seconds_from == "flops" else "") + duration(plan.seconds)


def _summary(missing: Sequence[Plan], cells: int) -> str:
    guessed = [plan.seconds for plan in missing if plan.seconds is not None]
    text = f"{len(missing)} of {cells} cells would run"
    if not missing:
        return text
    if not guessed:
        return f"{text}; no time estimate: nothing similar ran, and their FLOPs are unknown"
    unknown = len(missing) - len(guessed)
    text += f", about {duration(sum(guessed))}"
    return f"{text}, and {unknown} of unknown length" if unknown else text


def _planned(cell: RunRequest, record: Record | None, found: Runs, device: str) -> Plan:
    if record is not None:
        return Plan(cell=cell, record=record, why=record.run_id)
    if (reason := _unsupported(cell, device)) is not None:
        return Plan(cell=cell, why=f"none: unsupported: {reason}", runs=False)
    why = _why_not(cell, [r for _, r in found])
    if (seconds := _seconds(cell, found)) is not None:
        return Plan(cell=cell, why=why, seconds=seconds, seconds_from="runs")
    assumed = assumed_time(cell, device)
    return (
        Plan(cell=cell, why=why)
        if assumed is None
        else Plan(cell=cell, why=why, seconds=assumed.total, seconds_from="flops")
    )


def _unsupported(cell: RunRequest, device: str) -> str | None:
    """Why a strategy cannot run a cell; None: it can, or it is a third party's, which only ranks know."""
    if registry.strategy_of(cell.backend) is None:
        return None
    world = World.planned(
        cell.world_size, cell.world_size // cell.nodes, "cuda" if device == "cuda" else "cpu"
    )
    return why_not_planned(cell.backend, cell.job, world, cell.layout.micro_batch_size)


def _why_not(cell: RunRequest, records: Sequence[Record]) -> str:
    """Why no record can stand for a cell: what differs from the newest of this backend."""
    alike = [r for r in records if (r.backend.label, r.world.world_size) == (cell.backend, cell.world_size)]
    same = [r for r in alike if r.cell == cell.key]
    if same:
        refused = is_refused(same[-1])
        return "none: it was predicted not to fit" if refused else f"none: the last run is {same[-1].status}"
    if not alike:
        return "none: never ran in this folder"
    nearest = max(alike, key=lambda r: (r.job_id == cell.job_id, r.repeat == cell.repeat, r.created_at))
    return f"none: {_difference(cell, nearest)}"


def _difference(cell: RunRequest, record: Record) -> str:
    if cell.job_id != record.job_id:
        given, other = cell.job.model_dump(mode="json"), record.job.model_dump(mode="json")
        named = [".".join(keys) for keys, _, _ in differences(given, other)]
        return f"another job: {a_few(named)}" if named else "another job: its data or model changed"
    measure = record.measure.model_dump() if record.measure is not None else {}
    if named := [".".join(keys) for keys, _, _ in differences(cell.measure.model_dump(), measure)]:
        return f"measured with other settings: {a_few([f'measure.{name}' for name in named])}"
    if cell.job.training.deterministic != record.job.training.deterministic:
        return "other kernels: training.deterministic"
    if cell.repeat != record.repeat:
        return "this repeat never ran"
    if cell.preset != record.world.preset:
        return f"another preset: {record.world.preset}"
    if cell.memory_limit_bytes != record.world.memory_limit_bytes:
        return "another runtime.memory_limit"
    recorded = record.backend.versions
    here = package_versions(tuple(recorded))
    if changed := [name for name, version in recorded.items() if here.get(name) != version]:
        return f"other versions: {a_few(changed)}"
    return "code, machine, device or threads changed"


def _seconds(cell: RunRequest, found: Runs) -> float | None:
    """Median wall time of the runs most like a cell: of its backend and ranks, of its ranks, or of any."""
    for alike in (
        lambda r: (r.backend.label, r.world.world_size) == (cell.backend, cell.world_size),
        lambda r: r.world.world_size == cell.world_size,
        lambda r: True,
    ):
        times = [s for path, r in found if alike(r) and (s := _wall_seconds(path, r)) is not None]
        if times:
            return median(times)
    return None


def _wall_seconds(path: Path, record: Record) -> float | None:
    """From the start of a run to its record; None where the file was copied since, or has no time."""
    try:
        seconds = path.stat().st_mtime - datetime.fromisoformat(record.created_at).timestamp()
        seconds -= record.turns.waited_seconds if record.turns else 0.0
    except (OSError, ValueError):
        return None
    return seconds if 0 < seconds < time.time() and record.status == "ok" else None


def _document(plan: Plan, predicted: CellPredictions) -> dict[str, Any]:
    cell = plan.cell
    part = predicted.parts.get(cell.key)
    return {
        "backend": cell.backend,
        "world_size": cell.world_size,
        "repeat": cell.repeat,
        "deterministic": cell.job.training.deterministic,
        "run_id": plan.record.run_id if plan.record else None,
        "why": None if plan.record else plan.why.removeprefix("none: "),
        "seconds": plan.seconds,
        "seconds_from": plan.seconds_from,
        "prediction": part.model_dump(mode="json") if part else None,
        "no_prediction": predicted.reason(cell.key),
    }
