"""`harness recommend`: which strategy and batch to take on GPUs that are not here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from harness.cli.options import (
    MODEL,
    PATH,
    GivenFiles,
    PlannedJob,
    calibrate_options,
    calibrated_constants,
    common,
    config_option,
    gpus_per_node_option,
    json_option,
    named_fabric,
    planned_options,
    set_option,
)
from harness.cli.output import begin, counting_predictors, echo
from harness.job.config import load_experiment


@click.command()
@click.option(
    "--model", required=True, metavar="NAME|FOLDER|FILE",
    help=f"{MODEL}.",
)  # fmt: skip
@click.option("--gpus", "--world-size", type=click.IntRange(1), required=True, help="Number of GPUs.")
@click.option("--gpu", required=True, metavar="NAME", help="Such as H100-80.")
@gpus_per_node_option
@click.option("--fabric", metavar="NAME", help="Network between nodes, such as NDR400.")
@click.option("--hardware", type=PATH, metavar="FILE", help="YAML file with GPUs and fabrics of your own.")
@calibrate_options
@click.option(
    "--tokens-per-step", metavar="T",
    help="Of the global batch: 4194304, or 4M for 4e6; taken as given if the GPUs divide it, else one within "
    "5 % that micro-batches divide, else the nearest. Default: of the job's batch, else as GPT-3 of the "
    "model's size (0.5M to 3.2M), 64 samples for LoRA or one GPU, at least a sample a GPU.",
)  # fmt: skip
@config_option
@set_option
@json_option
@common
@planned_options
def recommend(
    model: str,
    gpus: int,
    gpu: str,
    gpus_per_node: int | None,
    fabric: str | None,
    hardware: Path | None,
    calibrate: tuple[Path, ...],
    save_calibration: Path | None,
    tokens_per_step: str | None,
    config: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
    given: GivenFiles,
) -> int:
    """Rank strategies, batches, checkpointing and offload for a model on GPUs.

    By predicted memory and speed. Says why the others lose, what is uncertain, when other parallelism is
    called for, and how to measure the best ones.
    """
    begin("tracing the model's activations")
    from harness.plan.hardware import load_hardware, ranks_per_node
    from harness.plan.recommend.question import ask, find_model, read_count
    from harness.plan.recommend.recommendation import Typed
    from harness.plan.recommend.recommendation import recommend as recommended
    from harness.plan.recommend.words import recommendation_lines

    known = load_hardware(hardware)
    device = known.device(gpu)
    constants = calibrated_constants(calibrate, save_calibration, device)
    with counting_predictors(constants) as predictors:
        job = given.planned(load_experiment(config, assignments), assignments)
        if job.backends:
            job = _with_open_batch(job, tokens=tokens_per_step is not None)
        question = ask(
            find_model(model, job.assignments),
            job.experiment,
            gpus=gpus,
            gpus_per_node=ranks_per_node(device, gpus_per_node),
            device=device,
            fabric=named_fabric(known, fabric),
            tokens=None if tokens_per_step is None else read_count(tokens_per_step),
            remarks=job.remarks,
        )
        typed = Typed(config=config, assignments=job.assignments, model=model)
        answer = recommended(question, typed, predictors)
    echo("\n".join(recommendation_lines(answer)), err=as_json)
    if as_json:
        echo(json.dumps(answer.as_json(), indent=1))
    return 0


def _with_open_batch(job: PlannedJob, *, tokens: bool) -> PlannedJob:
    """A file's job, whose strategy and split of the batch are open. `tokens`: those of a step are given."""
    from harness.plan.recommend.question import BATCH, with_open_batch

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
