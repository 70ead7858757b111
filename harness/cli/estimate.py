"""`harness estimate`: what a job would need on GPUs that are not here, and what to use there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import (
    MODEL,
    PATH,
    GivenFiles,
    Machine,
    PlannedJob,
    backends_option,
    common,
    config_option,
    json_option,
    machine_options,
    planned_options,
    set_option,
    split_backends,
)
from harness.cli.output import begin, counting_predictors, echo
from harness.job.config import load_experiment

if TYPE_CHECKING:
    from harness.plan.answer import Answer
    from harness.plan.hardware import Hardware

model_option = click.option("--model", metavar="NAME|FOLDER|FILE", help=f"{MODEL}; default: the job's.")
tokens_option = click.option(
    "--tokens-per-step", metavar="T",
    help="Of the global batch, whose split is searched: 4194304, or 4M for 4e6; taken as given if the GPUs "
    "divide it, else one within 5 % that micro-batches divide, else the nearest. Default: of the job's "
    "batch, else as GPT-3 of the model's size (0.5M to 3.2M), 64 samples for LoRA or one GPU, at least a "
    "sample a GPU.",
)  # fmt: skip


def question_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (json_option, set_option, tokens_option, config_option, model_option):
        command = option(command)
    return command


@click.command()
@question_options
@backends_option
@machine_options(default="8")
@click.option("--plot", type=PATH, help="Plot both over the number of ranks: FILE.svg or FILE.png.")
@click.option("--all", "whole", is_flag=True, help="Show every strategy, not the six that lead.")
@click.option("--details", is_flag=True, help="Show every line with its formula and source.")
@click.option("--list-models", is_flag=True, help="List the catalogue and exit.")
@click.option("--list-hardware", is_flag=True, help="List the known GPUs and fabrics and exit.")
@common
@planned_options
def estimate(
    backends: str | None,
    machine: Machine,
    plot: Path | None,
    whole: bool,
    details: bool,
    list_models: bool,
    list_hardware: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Predict memory, communication, speed and cost of a job by strategy, without GPUs.

    Sizes come from the model's configuration: no weights and no network are needed. Where the job names no
    batch, the answer is that of `harness recommend`.
    """
    if plot is not None:
        from harness.tell.pictures.drawing import plot_format

        plot_format(plot)  # refuses a format before anything is computed
    if list_models or list_hardware:
        return _list(machine.known, models=list_models)
    from harness.plan.document import document
    from harness.plan.text import answer_lines

    found = answers_of(machine, **asked, backends=split_backends(backends) if backends is not None else [])
    echo("\n".join(answer_lines(found, details=details, whole=whole)), err=as_json)
    if as_json:
        echo(json.dumps(document(found), indent=1))
    if plot is not None:
        from harness.plan.picture import write_picture

        write_picture([row for answer in found for row in answer.rows], [one.question for one in found], plot)
        echo(f"picture: {plot}", err=True)
    return 0


def answers_of(
    machine: Machine,
    model: str | None,
    config: Path | None,
    tokens_per_step: str | None,
    assignments: tuple[str, ...],
    given: GivenFiles,
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


def _with_open_batch(job: PlannedJob, *, tokens: bool) -> PlannedJob:
    """A file's job, whose strategy and split of the batch are open. `tokens`: those of a step are given."""
    from harness.plan.question import BATCH, with_open_batch

    experiment, left_open = with_open_batch(job.experiment, tokens=tokens)
    cut = tuple(f"training.{name}" for name in BATCH)
    (backend,) = job.backends
    any_strategy = f"the file runs {backend}; all strategies are compared, with options of their own"
    return replace(
        job,
        experiment=experiment,
        assignments=tuple(text for text in job.assignments if text.partition("=")[0] not in cut),
        remarks=(*job.remarks, *left_open, any_strategy),
    )


def _list(known: Hardware, *, models: bool) -> int:
    from harness.plan.models import catalogue_lines

    click.echo("\n".join(catalogue_lines() if models else known.lines()))
    return 0
