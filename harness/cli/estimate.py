"""`harness estimate`: what a job would need on GPUs that are not here, and what to use there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli import options
from harness.cli.output import begin, counting, counting_predictors, echo
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.cells import canonical_label
from harness.plan import simulation
from harness.plan.hardware import Device
from harness.plan.models import load_model
from harness.plan.simulation import as_json as document
from harness.run_directory.request import Tensors

if TYPE_CHECKING:
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
    given = options.split_backends(backends) if backends is not None else []
    found = answers_of(machine, **asked, backends=given)
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
    backends: list[str] | None = None,
    opens: bool = False,
) -> list[Answer]:
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
            backends=[*(backends or ()), *(() if opens else job.backends)] or ["all"],
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
    called for, and how to measure the best ones. The answer of `harness estimate` with the batch open.
    """
    given = options.split_backends(backends) if backends is not None else []
    found = answers_of(machine, **asked, backends=given, opens=True)
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
    world_sizes = options.numbers(world_size, "--world-size", "ranks")
    if max(world_sizes) > MOST_RANKS:
        raise HarnessError(f"--world-size {max(world_sizes)} is too large; give at most {MOST_RANKS}")
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
