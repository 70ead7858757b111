"""Records into the tools that people watch their runs with; after the runs, so that nothing is timed with it.

Goes through Accelerate's trackers; loads torch with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.judge.facts import metrics_in
from harness.judge.rows import JudgedRun
from harness.nested import leaves
from harness.record.store import run_folder

Tracker = Literal["tensorboard", "mlflow", "wandb"]
PROJECT = "sharding-harness"


def export_runs(comparison: Comparison, to: Tracker, directory: Path) -> int:
    """Log every run with steps as a run of the tool, into a folder; returns how many there were.

    Weights & Biases runs offline: `wandb sync` uploads the folder later. Raises HarnessError where the
    tool is not installed.
    """
    if find_spec(to) is None:
        raise HarnessError(f"--to {to}: the package '{to}' is not installed; `pip install {to}`")
    logged = [row for row in comparison.rows if row.record.steps]
    for row in logged:
        run_folder(directory, row.record.run_id)  # the tools make folders of these names
    directory.mkdir(parents=True, exist_ok=True)
    for row in logged:
        tracker = _start(row.record.run_id, to, directory)
        tracker.store_init_configuration(settings(row))
        for step, values in scalars(row):
            tracker.log(values, step=step)
        tracker.finish()
    return len(logged)


def settings(row: JudgedRun) -> dict[str, str | int | float | bool]:
    """What a run was configured with: simple values under dotted names."""
    record = row.record
    found: dict[str, str | int | float | bool] = {
        "backend": row.label, "world_size": record.world.world_size, "repeat": record.repeat,
        "job_id": record.job_id, "status": record.status, "parity": row.judgement.parity,
    }  # fmt: skip

    for keys, value in leaves({"job": record.job.model_dump(mode="json")}):
        if isinstance(value, str | int | float | bool):
            found[".".join(keys)] = value
    return found


def scalars(row: JudgedRun) -> Iterator[tuple[int, dict[str, float]]]:
    """Figures by step, those that are not finite left out; with the last step the figures of the run."""
    figures = row.figures
    keys = [metric.key for metric in metrics_in("tracking")]
    summary = {f"run/{key}": float(figures[key]) for key in keys if figures[key] is not None}
    last = row.record.steps[-1].step
    held_out = {part.step: part.loss for part in row.record.eval}
    for step in row.record.steps:
        values = {
            "train/loss": step.loss, "train/gradient_norm": step.gradient_norm,
            "train/learning_rate": step.learning_rate, "time/step_seconds": step.seconds,
            "evaluation/loss": held_out.get(step.step + 1),
        }  # fmt: skip
        known = {key: value for key, value in values.items() if value is not None}
        yield step.step, known | (summary if step.step == last else {})


def _start(run_id: str, to: Tracker, directory: Path) -> Any:
    from accelerate import PartialState, tracking

    PartialState(cpu=True)  # the trackers ask it whether they are the main process
    tracker: Any
    match to:
        case "tensorboard":
            tracker = tracking.TensorBoardTracker(run_id, logging_dir=directory)
        case "mlflow":
            import mlflow

            # Accelerate 1.15 takes logging_dir for artifacts only and leaves runs to MLflow's default.
            mlflow.set_tracking_uri(f"sqlite:///{(directory / 'mlflow.db').resolve()}")
            artifacts = (directory / "artifacts").resolve().as_uri()
            tracker = tracking.MLflowTracker(experiment_name=PROJECT, logging_dir=artifacts, run_name=run_id)
        case "wandb":
            tracker = tracking.WandBTracker(PROJECT, name=run_id, dir=str(directory), mode="offline")
    tracker.start()
    return tracker
