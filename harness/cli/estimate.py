"""`harness estimate`, `recommend` and `simulate`: what a job would need on GPUs that are not here, and which
strategy to use there; `harness fit`: the largest micro-batch that fits here, by real runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.backends import registry
from harness.backends.options import parts_of
from harness.cli import options
from harness.cli.output import (
    PREDICTING,
    PredictionCount,
    Progress,
    begin,
    counting,
    counting_predictors,
    echo,
)
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch import started_as_rank
from harness.launch.cells import canonical_label
from harness.launch.launcher import EventHandler, LocalLauncher, modules_to_preload
from harness.plan import simulation
from harness.plan.answer import Typed, option_words, set_words
from harness.plan.hardware import Device
from harness.plan.models import load_model
from harness.plan.simulation import as_json as document
from harness.record.store import Store
from harness.run_directory.request import RunRequest, Tensors
from harness.tell.formats import megabytes

if TYPE_CHECKING:
    from harness.plan import fit as fitting
    from harness.plan.answer import Answer

tokens_option = click.option("--tokens-per-step", metavar="T")


def question_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        options.json_option,
        options.set_option,
        tokens_option,
        options.config_option,
        options.model_option,
    ):
        command = option(command)
    return command


@click.command()
@question_options
@options.backends_option
@options.machine_options(default="8")
@click.option("--save-calibration", type=options.PATH, metavar="FILE")
@click.option("--all", "whole", is_flag=True)
@click.option("--details", is_flag=True)
@click.option("--list", "listed", type=click.Choice(["models", "hardware"]))
@options.common
@options.file_options
def estimate(
    backends: str | None,
    machine: options.Machine,
    whole: bool,
    details: bool,
    listed: str | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Predict memory, communication, speed and cost of a job by strategy, without GPUs.

    Sizes come from the model's configuration: no weights and no network are needed. Where the job names no
    batch, the answer is that of `harness recommend`.
    """
    if listed is not None:
        from harness.plan.models import catalogue_lines

        click.echo("\n".join(catalogue_lines() if listed == "models" else machine.known.lines()))
        return 0
    found = answers_of(machine, **asked, backends=backends)
    from harness.plan.document import document
    from harness.plan.text import answer_lines

    echo("\n".join(answer_lines(found, details=details, whole=whole)), err=as_json)
    if as_json:
        echo(json.dumps(document(found), indent=1))
    return 0


def answers_of(
    machine: options.Machine,
    model: str | None,
    config: Path | None,
    tokens_per_step: str | None,
    assignments: tuple[str, ...],
    given: options.GivenFiles,
    *,
    backends: str | None,
    opens: bool = False,
) -> list[Answer]:
    named = options.split_backends(backends) if backends is not None else []
    begin("tracing the model's activations")
    from harness.plan.answer import Typed, answers
    from harness.plan.question import asked_of, read_count

    where = machine.where()
    job = given.planned(load_experiment(config, assignments), assignments)
    if opens and job.backends:
        job = _with_open_batch(job, tokens=tokens_per_step is not None)
    with counting_predictors() as predictors:
        question = asked_of(
            job.experiment, model, assignments=job.assignments, remarks=job.remarks,
            backends=[*named, *(() if opens else job.backends)] or ["all"],
            tokens=None if tokens_per_step is None else read_count(tokens_per_step), opens=opens, **where,
        )  # fmt: skip
        typed = Typed(config=config, model=model, assignments=job.assignments, place=machine.words)
        return answers(question, typed, predictors)


def _with_open_batch(job: options.PlannedJob, *, tokens: bool) -> options.PlannedJob:
    """A file's job, whose strategy and split of the batch are open. `tokens`: those of a step are given."""
    from harness.judge.wording import listed
    from harness.plan.question import BATCH

    training, (backend,) = job.experiment.training, job.backends
    named = {name: value for name in BATCH if (value := getattr(training, name)) is not None}
    left_open = named if tokens or set(named) == {"micro_batch_size"} else {}
    said = listed([f"training.{name}={value}" for name, value in left_open.items()])
    changed = {"training": training.model_copy(update=dict.fromkeys(left_open))}
    return replace(
        job,
        experiment=job.experiment.model_copy(update=changed),
        assignments=tuple(
            text for text in job.assignments if text.partition("=")[0] not in [f"training.{n}" for n in BATCH]
        ),
        remarks=(
            *job.remarks,
            *([f"the file's {said} is left open"] if left_open else []),
            f"the file runs {backend}; all strategies are compared, with options of their own",
        ),
    )


@click.command()
@question_options
@options.backends_option
@options.machine_options()
@options.common
@options.file_options
def recommend(backends: str | None, machine: options.Machine, as_json: bool, **asked: Any) -> int:
    """Rank strategies, batches, checkpointing and offload for a model on GPUs.

    By predicted memory and speed. Says why the others lose, what is uncertain, when other parallelism is
    called for, and how to measure the best ones. Hours and price of a training: --set training.steps=N and
    --set compare.price_per_gpu_hour='2.5 USD'. The answer of `harness estimate` with the batch open.
    """
    found = answers_of(machine, **asked, backends=backends, opens=True)
    from harness.plan.document import recommendation
    from harness.plan.text import answer_lines

    echo("\n".join(answer_lines(found)), err=as_json)
    if as_json:
        documents = [recommendation(answer) for answer in found]
        echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    return 0


MOST_RANKS = 4096


@click.command()
@click.option("--backend", "--backends", "backends", required=True)
@options.ranks_options
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@options.model_option
@click.option("--tensors", type=click.Choice(["fake", "real"]), default="fake", show_default=True)
@options.config_option
@options.set_option
@options.json_option
@options.common
def simulate(
    backends: str,
    world_size: str,
    gpus_per_node: int | None,
    rank: int,
    model: str | None,
    tensors: Tensors,
    config: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Run a backend's code as one rank of a large job, and count memory and traffic.

    One process, no GPU, no network: collectives and memory of an ordinary step are counted, and shown next
    to the closed forms.
    """
    begin("preparing one rank of a large world")
    experiment = load_experiment(config, assignments)
    name = "the job's model"
    if model is not None:
        planned = load_model(model, assignments=assignments)
        experiment, name = simulation.with_model(experiment, planned.config), planned.name
    world_sizes = options.numbers(world_size, options.WORLD_SIZE, "ranks")
    if max(world_sizes) > MOST_RANKS:
        raise HarnessError(f"{options.WORLD_SIZE} {max(world_sizes)} is too large; give at most {MOST_RANKS}")
    labels = [canonical_label(label) for label in options.split_backends(backends)]
    asked = [
        simulation.plan_simulation(
            experiment, label, size, ranks_per_node=gpus_per_node or Device.gpus_per_node, rank=rank,
            tensors=tensors,
        )
        for size in world_sizes
        for label in labels
    ]  # fmt: skip
    rows: list[simulation.SimulatedRow] = []
    with counting("simulated rank", "simulating") as another:
        for one, result in zip(asked, simulation.run_simulations(asked), strict=True):
            row = simulation.compare_with_closed_forms(one, result)
            another()
            echo("\n".join([*([""] if rows else []), *simulation.row_lines(row)]), err=as_json)
            rows.append(row)
    if as_json:
        echo(json.dumps(document(rows, name), indent=1))
    return 0


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
    from harness.plan import fit as fitting

    job = given.planned(options.load_job(config, assignments, model), assignments)
    experiment, backend = job.experiment, backend or next(iter(job.backends), None)
    if backend is None:
        raise click.UsageError("Give --backend, or a file with --from-accelerate or --from-deepspeed.")
    label = canonical_label(backend)
    device = options.resolve_device(experiment.runtime.device)
    world_size = options.ranks_of(label, nproc, device)
    options.require_gpus(device, world_size)
    memory = fitting.find_limit(limit, experiment.runtime.memory_limit, device, world_size, hardware)
    parts = parts_of(registry.parse(label)[1], world_size)
    sizes = fitting.micro_batches(experiment, registry.mesh_of(label, world_size).data_size, parts=parts)
    store = Store(runs)
    store.prepare()
    typed = Typed(config=config, model=model, assignments=job.assignments)
    with counting("prediction", "checking the job and its model") as count:
        runner = fitting.Runner(
            experiment=experiment, label=label, world_size=world_size, limit=memory,
            launcher=LocalLauncher(device, modules_to_preload(experiment, [label])), store=store,
            command=options.command_line(), most_runs=most_runs, fresh=fresh, **_followed_by(count),
        )  # fmt: skip
        found = fitting.find(runner, sizes, experiment.training.micro_batch_size)
        count.doing = PREDICTING
        instead = [] if found.largest else runner.ways_out(sizes.sizes[0])

    lines = fitting.answer_lines(found, memory)
    for one in instead:
        place = {"--backend": one["backend"], "--nproc": world_size, "--limit": limit, "--hardware": hardware}
        words = [*typed.without(one["settings"]).job, *set_words(one["settings"])]
        one["command"] = shlex.join(["harness", "fit", *option_words(place), *words])
        lines += [f"what fits: {one['name']}: peak {megabytes(one['peak_bytes'])} MB", f"  {one['command']}"]
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
            "alternatives": instead,
            "trust": trust.as_json() if trust else None,
            "remarks": list(job.remarks),
            "trials": [trial.as_json() for trial in runner.trials],
        }
        echo(json.dumps(document, indent=1))
    return 0


def _followed_by(count: PredictionCount) -> dict[str, Any]:
    """What a `Runner` calls: predictions are counted, runs show themselves."""
    from harness.plan.fit import trial_line

    def on_event(cell: RunRequest) -> EventHandler:
        count.doing = ""
        name = f"{cell.backend} micro-batch {cell.layout.micro_batch_size}"
        return Progress(name, cell.data_size, sys.stderr, plain_lines=False)

    def on_trial(trial: fitting.Trial) -> None:
        count.doing = PREDICTING
        echo(trial_line(trial), err=True)

    def on_prediction() -> None:
        count.doing = PREDICTING
        count()

    return {"on_event": on_event, "on_trial": on_trial, "on_prediction": on_prediction}
