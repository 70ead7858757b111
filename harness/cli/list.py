"""`harness list`: the runs of a folder, one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click

from harness.cli.options.selection import all_runs
from harness.cli.options.shared import PATH, common, json_option, wide_option
from harness.cli.terminal.output import echo
from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED, STEP
from harness.judge.rows import JudgedRun, reason
from harness.record import Record
from harness.record.run import Status
from harness.tell.formats import fitted, megabytes, milliseconds, number


@click.command("list")
@click.argument("runs", type=PATH, default=Path("runs"))
@click.option("--backend", help="Only runs of this backend, with or without its options.")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
@click.option("--job", help="Only runs whose job id begins with this.")
@wide_option
@json_option
@common
def list(
    runs: Path, backend: str | None, status: str | None, job: str | None, wide: bool, as_json: bool
) -> int:
    """List the runs of a folder, oldest first, with status and figures.

    RUNS is a folder of runs or an archive of one; default: runs.
    """
    records = [record for _, record in all_runs(runs) if _is_wanted(record, backend, status, job)]
    documents = [_document(record) for record in records]
    if as_json:
        echo(json.dumps({"runs": documents}, indent=1))
        return 0
    headers = {
        "run_id": "run", "backend": "backend", "world_size": "ranks", "status": "status",
        "tokens_per_second": "tokens/s", "peak_bytes": "peak MB", "loss": "loss",
    }  # fmt: skip
    if wide:
        headers |= {
            "step_seconds": "step ms", "job_id": "job", "model": "model", "precision": "precision",
            "steps": "steps", "created_at": "started", "reason": "why",
        }  # fmt: skip
    texts = [[_text(key, document[key]) for key in headers] for document in documents]
    echo(fitted(texts, [*headers.values()], wide=wide))
    echo(f"{len(records)} runs; `harness show RUN` shows one in detail", err=True)
    return 0


def _is_wanted(record: Record, backend: str | None, status: str | None, job: str | None) -> bool:
    names = (record.backend.label, record.backend.name)
    return (
        (backend is None or backend in names)
        and (status is None or record.status == status)
        and (job is None or record.job_id.startswith(job))
    )


def _document(record: Record) -> dict[str, Any]:
    row = _row(record)
    figures = row.figures if row is not None else {}
    job = record.job
    return {
        "run_id": record.run_id,
        "created_at": record.created_at,
        "backend": record.backend.label,
        "world_size": record.world.world_size,
        "nodes": record.world.nodes,
        "status": record.status,
        "reason": reason(record),
        "job_id": record.job_id,
        "model": job.model.name or _model_kind(record),
        "precision": job.training.precision,
        "steps": len(record.steps),
        "loss": record.steps[-1].loss if record.steps else None,
        "tokens_per_second": figures.get(SPEED),
        "step_seconds": figures.get(STEP),
        "peak_bytes": figures.get("peak_bytes"),
    }


def _model_kind(record: Record) -> str | None:
    """Type of a model without a name; class of one that the user brings, None where it was not built."""
    if record.observation is None and record.job.model.factory is None:
        return record.job.model.config_values().get("model_type")
    return record.model.architecture if record.model else None


def _row(record: Record) -> JudgedRun | None:
    """The figures of a run; None for a repetition of the reference, which has none."""
    rows = Comparison([record]).rows
    return rows[0] if rows else None


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "peak_bytes":
        return megabytes(value)
    if key == "step_seconds":
        return milliseconds(value)
    return number(value) if isinstance(value, float) else str(value)
