"""`harness export ...`: measurements and settings for other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.cli import Group, options
from harness.cli.output import View, echo
from harness.errors import HarnessError
from harness.exported import folder as folders
from harness.job.batch import BatchLayout, batch_layout
from harness.job.experiment import Experiment, RuntimeSection
from harness.launch.cells import make_cell
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.record import Record
from harness.record.store import read_runs

EXAMPLE_STEPS = 5
"""Whose samples are written."""
JOB_FILE = "job.yaml"


@click.group(cls=Group)
def export() -> None:
    """Export records to other tools, or what was measured to a program of your own."""


def program_of_run(record: Record) -> tuple[Experiment, str, int, BatchLayout]:
    """Job, backend, ranks and batch of a run. Raises HarnessError for an observed script."""
    if record.observation is not None:
        raise HarnessError(f"run {record.run_id} is an observed script: it is a program already")
    from harness.diagnose.rerun import recorded_layout  # loads NumPy

    runtime = RuntimeSection.model_validate({"preset": record.world.preset})
    experiment = Experiment(**dict(record.job), runtime=runtime)
    return experiment, record.backend.label, record.world.world_size, recorded_layout(record)


@export.command()
@options.common
@click.argument("run", required=False, type=options.PATH)
@click.option("--to", "tool", type=click.Choice(folders.TOOLS))
@options.backend_option
@options.job_options
@options.nproc_option
@click.option("-o", "--output", required=True, type=options.PATH)
@options.file_options
def program(
    run: Path | None, tool: folders.Tool | None, backend: str | None, experiment: Experiment,
    nproc: int | None, output: Path, given: options.GivenFiles,
) -> int:  # fmt: skip
    """Write a program of your own: that of a RUN, or of --backend with its job.

    RUN is the folder of a run. The program is started by torchrun (DDP, FSDP1, FSDP2), the launcher of
    DeepSpeed, or accelerate launch, whose configuration is written too.
    """
    if run is not None:
        if backend or nproc or given.count or experiment != Experiment():
            raise HarnessError(f"'{run}' brings job, backend and ranks; leave the options for these out")
        ((_, record), *others), _ = read_runs([run])
        if others:
            raise HarnessError(f"'{run}' holds {1 + len(others)} runs; give the folder of one")
        experiment, label, ranks, layout = program_of_run(record)
        device = options.resolve_device("auto")
    else:
        experiment, label, _ = given.only_row(backend, experiment, View())
        device = options.resolve_device(experiment.runtime.device)
        ranks = nproc or options.default_ranks(device)
        layout = batch_layout(experiment.training, ranks)
    tool = tool or folders.tool_of(label)
    folders.require_exportable(tool, label, experiment)
    cell = make_cell(experiment, label, ranks, layout, 0, device)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [label]))
    job = cell.job.model_dump(mode="json")
    found = folders.exported_files(
        tool, label, cell.job, layout, world_size=ranks, device=device, preset=cell.preset,
        facts=launcher.check(json.dumps(job)),
        example=launcher.ask(
            "harness.rank.job_check:example_of",
            json.dumps({"job": job, "steps": EXAMPLE_STEPS}),
            "reading the job's data",
        ),
    )  # fmt: skip
    found[JOB_FILE] = json.dumps(experiment.model_dump(mode="json", exclude_unset=True), indent=1) + "\n"
    folders.write_folder(output, found)
    echo(f"{output}: {', '.join(found)}")
    if (
        tool == "accelerate"
        and device == "cpu"
        and folders.exported_strategy(label).family.startswith("fsdp")
    ):
        echo("Accelerate shards with FSDP on GPUs only; on the CPU this file would start DDP", err=True)
    launch = (folders.LAUNCH if device == "cuda" else folders.ON_CPU)[tool].format(ranks=ranks)
    echo(f"start it with: cd {output} && {launch}")
    return 0


@export.command()
@options.common
@click.argument("runs", nargs=-1, required=True, type=options.PATH)
@click.option("--to", required=True, type=click.Choice(["tensorboard", "mlflow", "wandb"]))
@click.option("-o", "--output", required=True, type=options.PATH)
def tracking(runs: tuple[Path, ...], to: Any, output: Path) -> int:
    """Log records to TensorBoard, MLflow or Weights & Biases (offline), one run each."""
    from harness.exported.tracking import export_runs
    from harness.judge.comparison import Comparison

    found, unreadable = read_runs(runs)
    options.warn_skipped(unreadable)
    count = export_runs(Comparison(record for _, record in found), to, output)
    echo(f"{output}: {count} of {len(found)} runs logged for {to}", err=True)
    return 0
