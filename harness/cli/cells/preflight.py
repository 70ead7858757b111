"""What cells will need in memory, shown before they start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.judge.wording import ranks
from harness.launch import external_rank
from harness.launch.cells import Cell
from harness.launch.launcher import LocalLauncher
from harness.record import PredictionPart
from harness.run_directory.request import RunRequest

if TYPE_CHECKING:
    from harness.plan.preflight import CellPredictions

force_option = click.option("--force", is_flag=True, help="Start runs that are predicted not to fit.")


def predict_cells(
    cells: Sequence[Cell],
    facts: Mapping[str, dict[str, Any]],
    experiment: Experiment,
    launcher: LocalLauncher,
    *,
    force: bool,
) -> CellPredictions:
    """Predict cells that are about to run on this machine.

    `facts`: by job id, what the check of the job returned.
    """
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_cells, predict_runs

    runtime = experiment.runtime
    limits = limits_here(launcher.device, runtime.memory_limit)
    candidates = of_cells(cells, facts, launcher.device, limits)
    return predict_runs(candidates, limits, force=force, trace=launcher.trace)


def predict_unchecked(
    cells: Sequence[Cell], device: str, memory_limit: int | None, *, force: bool
) -> CellPredictions:
    """The same for cells of jobs that nobody checked, from their configurations alone."""
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_cells, predict_runs

    limits = limits_here(device, memory_limit)
    return predict_runs(of_cells(cells, {}, device, limits), limits, force=force)


def predict_one(
    cell: Cell, facts: dict[str, Any], experiment: Experiment, launcher: LocalLauncher, *, force: bool,
    shows: bool = True,
) -> PredictionPart | None:  # fmt: skip
    """The same for one cell, and show it if `shows`. Raises HarnessError if it cannot fit."""
    predicted = predict_cells([cell], {cell.job_id: facts}, experiment, launcher, force=force)
    if (refusal := predicted.refusal(cell.key)) is not None:
        raise HarnessError(f"{cell.backend} on {ranks(cell.world_size)}: {refusal}")
    if shows:
        show(predicted)
        say_whole([facts], experiment)
        say_repeated([facts], [cell])
    return predicted.parts.get(cell.key)


def refuse_as_rank(request: RunRequest, *, force: bool) -> None:
    """Raise HarnessError if the ranks of this node, one of which this process is, cannot fit.

    One rank of a node asks, before it meets the others: they wait for it and hold nothing yet.
    """
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_requests, predict_runs

    limits = limits_here(request.device, request.memory_limit_bytes)
    refusal = predict_runs(of_requests([request], limits), limits, force=force).refusal(request.run_id)
    if refusal is not None:
        problem = f"{request.backend} on {ranks(request.world_size)}: {refusal}"
        if external_rank() != 0:  # the first rank of all shows its own error
            echo(f"harness: {problem}", err=True)
        raise HarnessError(problem)


def say_whole(facts: Iterable[Mapping[str, Any]], experiment: Experiment) -> None:
    """Why ranks of a strategy that shards weights build the model whole, on standard error."""
    loading = experiment.runtime.loading
    reasons = {found["model"].get("whole_because") for found in facts} if loading == "slices" else set()
    if loading == "broadcast" and experiment.model.factory is not None:
        reasons = {"a model of model.factory has no broadcast; runtime.loading=slices builds it whole once"}
    for reason in sorted(reasons - {None}):
        echo(f"loading: full (every rank builds the whole model): {reason}", err=True)


def say_repeated(facts: Iterable[Mapping[str, Any]], cells: Sequence[Cell]) -> None:
    """That batches repeat samples, where there are fewer than one batch takes; on standard error."""
    samples = min((found["data"]["training_samples"] for found in facts), default=0)
    batch = max(cell.layout.global_batch_size for cell in cells)
    if samples < batch:
        echo(
            f"data: {samples} training samples are less than a global batch of {batch}: each repeats some",
            err=True,
        )


def show(predicted: CellPredictions) -> None:
    """The predictions on standard error."""
    for line in predicted.lines():
        echo(line, err=True)
