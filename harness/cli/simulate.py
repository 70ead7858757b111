"""`harness simulate`: counts what one rank of a large world communicates and holds, without the world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from harness.cli.options import (
    BACKENDS,
    MODEL,
    common,
    config_option,
    json_option,
    numbers,
    ranks_options,
    set_option,
    split_backends,
)
from harness.cli.output import begin, counting, echo
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.cells import canonical_label
from harness.plan.hardware import Device
from harness.plan.models import load_model
from harness.plan.simulation import (
    Simulated,
    SimulatedRow,
    compare_with_closed_forms,
    plan_simulation,
    row_lines,
    run_simulations,
    with_model,
)
from harness.plan.simulation import as_json as document
from harness.run_directory.request import Tensors

MOST_RANKS = 4096


@click.command()
@click.option("--backend", "--backends", "backends", required=True, help=BACKENDS)
@ranks_options
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank to simulate.")
@click.option("--model", metavar="NAME|FOLDER|FILE", help=f"{MODEL}; default: the job's.")
@click.option(
    "--tensors", type=click.Choice(["fake", "real"]), default="fake", show_default=True,
    help="fake: without data, any size; real: with data, and buffers of kernels, for small models.",
)  # fmt: skip
@config_option
@set_option
@json_option
@common
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
        experiment, name = with_model(experiment, planned.config), planned.name
    world_sizes = numbers(world_size, "--world-size", "ranks")
    if max(world_sizes) > MOST_RANKS:
        raise HarnessError(f"--world-size {max(world_sizes)} is too large; give at most {MOST_RANKS}")
    labels = [canonical_label(label) for label in split_backends(backends)]
    asked = [
        plan_simulation(
            experiment, label, size, ranks_per_node=gpus_per_node or Device.gpus_per_node, rank=rank,
            tensors=tensors,
        )
        for size in world_sizes
        for label in labels
    ]  # fmt: skip
    rows = _simulate(asked, quiet=as_json)
    if as_json:
        echo(json.dumps(document(rows, name), indent=1))
    return 0


def _simulate(asked: Sequence[Simulated], *, quiet: bool) -> list[SimulatedRow]:
    rows: list[SimulatedRow] = []
    answers = run_simulations([one.request for one in asked])
    with counting("simulated rank", "simulating") as another:
        for one, result in zip(asked, answers, strict=True):
            row = compare_with_closed_forms(one, result)
            another()
            echo("\n".join([*([""] if rows else []), *row_lines(row)]), err=quiet)
            rows.append(row)
    return rows
