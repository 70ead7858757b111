"""`harness estimate`: what a job would need on GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options import (
    MODEL,
    PATH,
    GivenFiles,
    backends_option,
    calibrate_options,
    calibrated_constants,
    common,
    config_option,
    gpus_per_node_option,
    json_option,
    named_fabric,
    numbers,
    planned_options,
    set_option,
    split_backends,
)
from harness.cli.output import begin, counting_predictors
from harness.job.config import load_experiment

if TYPE_CHECKING:
    from harness.plan.estimate.question import EstimateRequest
    from harness.plan.estimate.row import EstimateRow
    from harness.plan.hardware import Hardware


@click.command()
@click.option(
    "--model",
    metavar="NAME|FOLDER|FILE",
    help=f"{MODEL}; default: the job's.",
)
@config_option
@backends_option
@click.option(
    "--world-size", "--gpus", metavar="N[,N...]", default="8", show_default=True, help="Numbers of ranks."
)
@gpus_per_node_option
@click.option("--gpu", metavar="NAME", help="Such as H100-80: says what fits, and how fast it is.")
@click.option("--fabric", metavar="NAME", help="Network between nodes, such as NDR400.")
@click.option("--hardware", type=PATH, metavar="FILE", help="YAML file with GPUs and fabrics of your own.")
@click.option("--plot", type=PATH, help="Plot both over the number of ranks: FILE.svg or FILE.png.")
@calibrate_options
@click.option("--all", "whole", is_flag=True, help="Show every strategy, not the six that lead.")
@click.option("--details", is_flag=True, help="Show every line with its formula and source.")
@click.option("--list-models", is_flag=True, help="List the catalogue and exit.")
@click.option("--list-hardware", is_flag=True, help="List the known GPUs and fabrics and exit.")
@set_option
@json_option
@common
@planned_options
def estimate(
    model: str | None,
    config: Path | None,
    backends: str | None,
    world_size: str,
    gpus_per_node: int | None,
    gpu: str | None,
    fabric: str | None,
    hardware: Path | None,
    plot: Path | None,
    calibrate: tuple[Path, ...],
    save_calibration: Path | None,
    whole: bool,
    details: bool,
    list_models: bool,
    list_hardware: bool,
    assignments: tuple[str, ...],
    as_json: bool,
    given: GivenFiles,
) -> int:
    """Predict memory, communication, speed and cost of a job by strategy, without GPUs.

    Sizes come from the model's configuration: no weights and no network are needed.
    """
    from harness.plan.command_words import option_words
    from harness.plan.estimate.question import asked_of
    from harness.plan.hardware import load_hardware, ranks_per_node

    known = load_hardware(hardware)
    if plot is not None:
        from harness.tell.pictures.drawing import plot_format

        plot_format(plot)  # refuses a format before anything is computed
    if list_models or list_hardware:
        return _list(known, models=list_models)
    begin("tracing the model's activations")
    device = None if gpu is None else known.device(gpu)
    job = given.planned(load_experiment(config, assignments), assignments)
    asked = asked_of(
        job.experiment, model, assignments=job.assignments, remarks=job.remarks,
        backends=[*(split_backends(backends) if backends is not None else ()), *job.backends] or ["all"],
        world_sizes=numbers(world_size, "--world-size", "ranks"),
        ranks_per_node=ranks_per_node(device, gpus_per_node), device=device,
        fabric=named_fabric(known, fabric),
        constants=calibrated_constants(calibrate, save_calibration, device),
    )  # fmt: skip
    words = option_words(
        {
            "--model": model, "--config": config, "--gpu": gpu, "--gpus-per-node": gpus_per_node,
            "--fabric": fabric, "--hardware": hardware,
        },
        job.assignments,
    )  # fmt: skip
    rows = _answer(asked, words, details=details, whole=whole, as_json=as_json)
    if plot is not None:
        _draw(asked, rows, plot)
    return 0


def _draw(asked: EstimateRequest, rows: list[EstimateRow], plot: Path) -> None:
    from harness.plan.estimate.picture import write_picture

    write_picture(asked, rows, plot)
    click.echo(f"picture: {plot}", err=True)


def _list(known: Hardware, *, models: bool) -> int:
    from harness.plan.models import catalogue_lines

    click.echo("\n".join(catalogue_lines() if models else known.lines()))
    return 0


def _answer(
    asked: EstimateRequest, words: list[str], *, details: bool, whole: bool, as_json: bool
) -> list[EstimateRow]:
    from harness.plan.estimate import document
    from harness.plan.estimate.row import alternatives_of_rows
    from harness.plan.estimate.row import estimate as estimated
    from harness.plan.estimate.table import estimate_lines

    with counting_predictors() as predictors:
        rows = estimated(asked, predictors)
        instead = alternatives_of_rows(rows, predictors)
    for line in estimate_lines(asked, rows, details=details, whole=whole, instead=instead, words=words):
        click.echo(line, err=as_json)
    if as_json:
        click.echo(json.dumps(document(asked, rows, instead, words), indent=1))
    return rows
