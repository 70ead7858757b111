"""`harness compare --dry-run`: which cells would run, why, and for how long."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from harness.backends import registry
from harness.backends.base import World
from harness.cli.matrix_progress import duration
from harness.cli.output import echo
from harness.cli.view import View
from harness.job.pairs import why_refused
from harness.launch.cells import Cell, is_refused
from harness.nested import differences
from harness.plan.estimate.question import why_not_micro_batched, why_unsupported
from harness.plan.wall_time import ASSUMED, assumed_time
from harness.record import Record
from harness.record.provenance import package_versions
from harness.tell.narrow import narrow

MOST_NAMED = 3
"""Settings that one line names."""
Runs = Sequence[tuple[Path, Record]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cell before it runs."""

    cell: Cell
    record: Record | None
    """The record that would be used."""
    why: str
    """Why there is none, or which one."""
    seconds: float | None
    """How long it would run; None: not known."""
    seconds_from: Literal["runs", "flops"] | None
    """Like runs of this folder, or the model's FLOPs over an assumed rate."""
    runs: bool = True
    """Whether ranks would start if there is no record: not where the strategy cannot run this job."""


def show_plan(
    cells: Sequence[Cell], known: Mapping[str, Record], found: Runs, device: str, *, as_json: bool, view: View
) -> int:
    """Show what `harness compare` would do with these cells, and do nothing.

    `known`: the records that would be used, by cell; `found`: all of the folder.
    """
    plans = [_planned(cell, known.get(cell.key), found, device) for cell in cells]
    missing = [plan for plan in plans if plan.record is None and plan.runs]
    if as_json:
        echo(json.dumps({"cells": [_document(plan) for plan in plans]}, indent=1))
        return 0
    headers = ("backend", "ranks", "repeat", "time", "record")
    rows = [
        [
            plan.cell.backend, str(plan.cell.world_size), str(plan.cell.repeat),
            _time(plan), plan.why,
        ]
        for plan in plans
    ]  # fmt: skip
    echo(narrow(rows, headers, shrinks=("backend", "record"), wide=view.wide))
    echo(_summary(missing, len(plans)), err=True)
    if any(plan.seconds_from == "flops" for plan in missing):
        echo(ASSUMED, err=True)
    return 0


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
        return f"{text}; no estimate of their time: nothing like them ran, and their FLOPs are not known"
    unknown = len(missing) - len(guessed)
    text += f", about {duration(sum(guessed))}"
    return f"{text}, and {unknown} for an unknown time" if unknown else text


def _planned(cell: Cell, record: Record | None, found: Runs, device: str) -> Plan:
    if record is not None:
        return Plan(cell=cell, record=record, why=record.run_id, seconds=None, seconds_from=None)
    if (reason := _unsupported(cell, device)) is not None:
        why = f"none: unsupported: {reason}"
        return Plan(cell=cell, record=None, why=why, seconds=None, seconds_from=None, runs=False)
    why = _why_not(cell, [r for _, r in found])
    if (seconds := _seconds(cell, found)) is not None:
        return Plan(cell=cell, record=None, why=why, seconds=seconds, seconds_from="runs")
    assumed = assumed_time(cell, device)
    if assumed is None:
        return Plan(cell=cell, record=None, why=why, seconds=None, seconds_from=None)
    return Plan(cell=cell, record=None, why=why, seconds=assumed.total, seconds_from="flops")


def _unsupported(cell: Cell, device: str) -> str | None:
    """Why a strategy cannot run a cell; None: it can, or it is a third party's, which only ranks know."""
    entry, options = registry.parse(cell.backend)
    if entry.strategy is None:
        return None
    world = World(
        rank=0, world_size=cell.world_size, local_rank=0, ranks_per_node=cell.world_size // cell.nodes,
        device="cuda" if device == "cuda" else "cpu",
    )  # fmt: skip
    return (
        why_unsupported(entry.strategy, options, cell.job.training.held_precision, world)
        or why_refused(cell.backend, cell.world_size, cell.job)
        or why_not_micro_batched(options, cell.world_size, cell.layout.micro_batch_size)
    )


def _why_not(cell: Cell, records: Sequence[Record]) -> str:
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


def _difference(cell: Cell, record: Record) -> str:
    if cell.job_id != record.job_id:
        given, other = cell.job.model_dump(mode="json"), record.job.model_dump(mode="json")
        named = [".".join(keys) for keys, _, _ in differences(given, other)]
        return f"another job: {_listed(named)}" if named else "another job: its data or model changed"
    measure = record.measure.model_dump() if record.measure is not None else {}
    if named := [".".join(keys) for keys, _, _ in differences(cell.measure.model_dump(), measure)]:
        return f"measured otherwise: {_listed([f'measure.{name}' for name in named])}"
    if cell.repeat != record.repeat:
        return "this repeat never ran"
    if cell.preset != record.world.preset:
        return f"another preset: {record.world.preset}"
    if cell.memory_limit_bytes != record.world.memory_limit_bytes:
        return "another runtime.memory_limit"
    recorded = record.backend.versions
    here = package_versions(tuple(recorded))
    if changed := [name for name, version in recorded.items() if here.get(name) != version]:
        return f"other versions: {_listed(changed)}"
    return "code, machine, device or threads changed"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _seconds(cell: Cell, found: Runs) -> float | None:
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
    except (OSError, ValueError):
        return None
    return seconds if 0 < seconds < time.time() and record.status == "ok" else None


def _document(plan: Plan) -> dict[str, Any]:
    cell = plan.cell
    return {
        "backend": cell.backend,
        "world_size": cell.world_size,
        "repeat": cell.repeat,
        "run_id": plan.record.run_id if plan.record else None,
        "why": None if plan.record else plan.why.removeprefix("none: "),
        "seconds": plan.seconds,
        "seconds_from": plan.seconds_from,
    }
