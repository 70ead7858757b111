"""`harness diagnose`: reruns two runs up to the step in which they part; prints through click."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from harness.diagnose.verdict import conclude, step_to_examine
from harness.errors import HarnessError
from harness.launch.local import LocalLauncher
from harness.launch.tail import Tail
from harness.record import Record
from harness.request import RunRequest, rank_file
from harness.spec import Job, MeasureSection
from harness.store import read_runs

TIMEOUT_SECONDS = 1800.0


def diagnose_runs(first: Path, second: Path, as_json: bool) -> int:
    """Name the step, the tensors and the ratio in which two runs part."""
    records = [_one(path) for path in (first, second)]
    if records[0].job_id != records[1].job_id:
        raise HarnessError(
            f"runs of different jobs cannot be diagnosed: {records[0].job_id} and {records[1].job_id}; give "
            "two runs of one job"
        )
    step = step_to_examine(*records)
    said: list[str] = ["losses, gradient norms and final weights agree"]
    if step is not None:
        examined = [_examine(record, step) for record in records]
        world = max((r.world for r in records), key=lambda w: w.world_size)
        precision = records[0].job["training"]["precision"]
        said = conclude(examined[0], examined[1], world.world_size, world.accumulation_steps, precision)
    names = [f"{r.backend.label} on {r.world.world_size}" for r in records]
    if as_json:
        click.echo(json.dumps({"runs": [r.run_id for r in records], "step": step, "said": said}, indent=1))
        return 0
    click.echo(f"{names[1]} beside {names[0]}" + (f", step {step}:" if step is not None else ":"))
    for sentence in said:
        click.echo(f"- {sentence}")
    return 0


def _one(path: Path) -> Record:
    found, unreadable = read_runs([path])
    if len(found) != 1:
        problem = f"; {unreadable[0]}" if unreadable else ""
        raise HarnessError(
            f"'{path}' holds {len(found)} readable records{problem}; give the folder of one run"
        )
    return found[0][1]


def _examine(record: Record, step: int) -> dict[str, Any]:
    """Rerun a run up to a step; what rank 0 wrote of it."""
    launcher = LocalLauncher(record.world.device)
    with tempfile.TemporaryDirectory(prefix="harness-diagnose-") as scratch:
        folder = Path(scratch)
        request = RunRequest(
            run_id=record.run_id, created_at=record.created_at, command=record.command,
            backend=record.backend.label, job=Job.model_validate(record.job), job_id=record.job_id,
            cell=record.cell, repeat=record.repeat, measure=MeasureSection(warmup_steps=step + 1),
            preset=record.world.preset, device=record.world.device, world_size=record.world.world_size,
            ranks_per_node=record.world.world_size, threads_per_rank=record.world.threads_per_rank,
            micro_batch_size=record.world.micro_batch_size,
            accumulation_steps=record.world.accumulation_steps, examine_step=step,
        )  # fmt: skip
        request.write(folder)
        click.echo(f"rerunning {record.backend.label} up to step {step}", err=True)
        launcher.run(folder, request, timeout_seconds=TIMEOUT_SECONDS, on_event=lambda _: None)
        events = Tail(rank_file(folder, 0)).read()
    for event in events:
        if event["kind"] == "examined":
            return event
    failure = next(
        (event["message"] for event in events if event["kind"] == "failure"), "no step was examined"
    )
    raise HarnessError(f"{record.backend.label} could not be rerun up to step {step}: {failure}")
