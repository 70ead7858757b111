"""`harness fit`: the largest micro-batch that fits and the fastest one, found by real runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from harness.backends import registry
from harness.backends.options import parts_of
from harness.cli import options
from harness.cli.output import PREDICTING, PredictionCount, Progress, begin, counting, echo
from harness.errors import HarnessError
from harness.launch import started_as_rank
from harness.launch.cells import canonical_label
from harness.launch.launcher import EventHandler, LocalLauncher, modules_to_preload
from harness.plan import fit as fitting
from harness.plan.alternatives import Alternative, alternative_lines
from harness.plan.answer import option_words, set_words
from harness.record.store import Store
from harness.run_directory.request import RunRequest


@click.command()
@click.option("--backend")
@options.config_option
@options.model_option
@click.option("--nproc", type=click.IntRange(1))
@click.option("--limit", "--gpu", "limit")
@click.option("--hardware", type=options.PATH, metavar="FILE")
@click.option("--most-runs", type=click.IntRange(1), default=16, show_default=True)
@click.option("--fresh", is_flag=True)
@options.set_option
@options.runs_option
@options.json_option
@options.measuring
@options.file_options
def fit(
    backend: str | None,
    config: Path | None,
    model: str | None,
    nproc: int | None,
    limit: str | None,
    hardware: Path | None,
    most_runs: int,
    fresh: bool,
    assignments: tuple[str, ...],
    runs: Path,
    as_json: bool,
    given: options.GivenFiles,
) -> int:
    """Find the largest micro-batch that fits, and the fastest one.

    Predicts it first, then tries sizes in short runs; a run that is out of memory is an answer.
    """
    if started_as_rank():
        raise HarnessError("fit starts its own ranks: run it without torchrun")
    begin("checking the job, its data and this machine")
    job = given.planned(options.load_job(config, assignments, model), assignments)
    experiment, backend = job.experiment, backend or next(iter(job.backends), None)
    if backend is None:
        raise click.UsageError("Give --backend, or a file with --from-accelerate or --from-deepspeed.")
    label = canonical_label(backend)
    device = options.resolve_device(experiment.runtime.device)
    world_size = (
        1 if registry.parse(label)[0].name == registry.REFERENCE else nproc or options.default_ranks(device)
    )
    options.require_gpus(device, world_size)
    memory = fitting.find_limit(limit, experiment.runtime.memory_limit, device, world_size, hardware)
    parts = parts_of(registry.parse(label)[1], world_size)
    sizes = fitting.micro_batches(experiment, registry.mesh_of(label, world_size).data_size, parts=parts)
    store = Store(runs)
    store.prepare()
    given_words = {"--config": config, "--model": model, "--limit": limit, "--hardware": hardware}
    words = option_words(given_words) + [word for text in job.assignments for word in ("--set", text)]
    with counting("prediction", "checking the job and its model") as count:
        runner = fitting.Runner(
            experiment=experiment, label=label, world_size=world_size, limit=memory,
            launcher=LocalLauncher(device, modules_to_preload(experiment, [label])), store=store,
            command=options.command_line(), most_runs=most_runs, fresh=fresh, **_followed_by(count),
        )  # fmt: skip
        found = fitting.find(runner, sizes, experiment.training.micro_batch_size)
        count.doing = PREDICTING
        instead = [] if found.largest else runner.alternatives()

    def command(one: Alternative) -> str:
        place = ["--backend", one.label, "--nproc", str(one.world_size)]
        return shlex.join(["harness", "fit", *place, *words, *set_words(one.settings)])

    lines = fitting.answer_lines(found, memory)
    if instead:
        lines += ["", *alternative_lines(instead, command)]
    error, trust = fitting.error_line(runner.trials), runner.trust()
    lines += [*([error] if error else []), *(trust.lines() if trust else [])]
    lines += [f"note: {remark}" for remark in job.remarks]
    text = "\n".join([*lines, "", fitting.trial_table(runner.trials)])
    echo(text, err=as_json)
    if as_json:
        document: dict[str, Any] = {
            "backend": runner.label,
            "world_size": runner.world_size,
            "limit_bytes": memory.limit_bytes,
            "limit": memory.origin,
            "micro_batch": found.as_json(),
            "alternatives": [{**one.as_json(), "command": command(one)} for one in instead],
            "trust": trust.as_json() if trust else None,
            "remarks": list(job.remarks),
            "trials": [trial.as_json() for trial in runner.trials],
        }
        echo(json.dumps(document, indent=1))
    return 0


def _followed_by(count: PredictionCount) -> dict[str, Any]:
    """What a `Runner` calls: predictions are counted, runs show themselves."""

    def on_event(cell: RunRequest) -> EventHandler:
        count.doing = ""
        name = f"{cell.backend} micro-batch {cell.layout.micro_batch_size}"
        return Progress(name, cell.data_size, sys.stderr, plain_lines=False)

    def on_trial(trial: fitting.Trial) -> None:
        count.doing = PREDICTING
        echo(fitting.trial_line(trial), err=True)

    def on_prediction() -> None:
        count.doing = PREDICTING
        count()

    return {"on_event": on_event, "on_trial": on_trial, "on_prediction": on_prediction}
