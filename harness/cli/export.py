"""`harness export ...`: measurements and settings for other tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import completion
from harness.cli.options.arguments import default_ranks
from harness.cli.options.device import resolve_device
from harness.cli.options.imported import GivenFiles, given_options
from harness.cli.options.shared import (
    PATH,
    common,
    config_option,
    load_job,
    model_option,
    set_option,
    warn_skipped,
)
from harness.cli.terminal.output import View, echo
from harness.errors import HarnessError
from harness.import_path import ask_module
from harness.run_directory.checkpoint import DESCRIPTION
from harness.run_directory.request import checkpoint_folder

if TYPE_CHECKING:
    from harness.exported.folder import Tool

MOST_STEPS = 5
"""Steps of the example whose samples are written."""
JOB_FILE = "job.yaml"


def program(tool: Tool, summary: str) -> click.Command:
    """The command of one tool."""

    @common
    @given_options
    def export(**arguments: Any) -> int:
        return _export(tool, **arguments)

    described: Callable[..., None] = export
    for option in reversed((
        click.option(
            "--backend", help="Name, with options after a colon.", shell_complete=completion.backend),
        config_option,
        model_option,
        set_option,
        click.option("--nproc", type=click.IntRange(1), help="Ranks on this machine."),
        click.option("-o", "--output", required=True, type=PATH, help="New folder for the files."),
        click.option("--steps", type=click.IntRange(1), default=MOST_STEPS, show_default=True,
                     help="Steps of the example, whose samples are written."),
    )):  # fmt: skip
        described = option(described)
    return click.command(name=tool, help=summary)(described)


def _export(
    tool: Tool, backend: str | None, config: Path | None, model: str | None, assignments: tuple[str, ...],
    nproc: int | None, output: Path, steps: int, given: GivenFiles,
) -> int:  # fmt: skip
    from harness.exported.folder import (
        LAUNCH,
        ON_CPU,
        exported_files,
        exported_strategy,
        require_exportable,
        write_folder,
    )
    from harness.job.batch import batch_layout
    from harness.launch.cells import canonical_label, make_cell
    from harness.launch.launcher import LocalLauncher, modules_to_preload

    experiment = load_job(config, assignments, model)
    row = given.only_row(backend, experiment, View())
    experiment = row.experiment if row is not None else experiment
    label = row.label if row is not None else canonical_label(backend or "")
    require_exportable(tool, label, experiment)
    device = resolve_device(experiment.runtime.device)
    ranks = nproc or default_ranks(device)
    layout = batch_layout(experiment.training, ranks)
    cell = make_cell(experiment, label, ranks, layout, 0, device)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [label]))
    job = cell.job.model_dump(mode="json")
    found = exported_files(
        tool, label, cell.job, layout, world_size=ranks, device=device, preset=cell.preset,
        facts=launcher.check(json.dumps(job)),
        example=launcher.example(json.dumps({"job": job, "steps": steps})),
    )  # fmt: skip
    found[JOB_FILE] = json.dumps(experiment.model_dump(mode="json", exclude_unset=True), indent=1) + "\n"
    write_folder(output, found)
    launch = (LAUNCH if device == "cuda" else ON_CPU)[tool].format(ranks=ranks)
    echo(f"{output}: {', '.join(found)}")
    if tool == "accelerate" and device == "cpu" and exported_strategy(label).family.startswith("fsdp"):
        echo("Accelerate shards with FSDP on GPUs only; on the CPU this file would start DDP", err=True)
    echo(f"start it with: cd {output} && {launch}")
    return 0


@click.group()
def export() -> None:
    """Export records to other tools, or what was measured to a program of your own."""


export.add_command(program("accelerate", "Write a file for accelerate launch, and a program that it starts."))
export.add_command(program("deepspeed", "Write DeepSpeed's JSON, and a program with deepspeed.initialize."))
export.add_command(program("torchrun", "Write a program with DDP, FSDP1 or FSDP2 for torchrun."))


@export.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option(
    "--to", required=True, type=click.Choice(["tensorboard", "mlflow", "wandb"]), help="Tool to export to."
)
@click.option("-o", "--output", required=True, type=PATH, help="Folder for the tool's files.")
@common
def tracking(runs: tuple[Path, ...], to: Any, output: Path) -> int:
    """Log records to TensorBoard, MLflow or Weights & Biases (offline), one run each."""
    from harness.exported.tracking import export_runs
    from harness.judge.comparison import Comparison
    from harness.record.store import read_runs

    found, unreadable = read_runs(runs)
    warn_skipped(unreadable)
    count = export_runs(Comparison(record for _, record in found), to, output)
    echo(f"{output}: {count} of {len(found)} runs logged for {to}", err=True)
    return 0


@export.command()
@click.argument("run", type=PATH)
@click.option("--merged", is_flag=True, help="Merge the adapters into the model's weights.")
@click.option("-o", "--output", required=True, type=PATH, help="Folder for the files.")
@common
def adapter(run: Path, merged: bool, output: Path) -> int:
    """Write the adapters of a run's kept checkpoint as safetensors that peft reads.

    With --merged: the whole model as transformers reads it. RUN is the folder of a run, or of its checkpoint.
    """
    from harness.exported.folder import require_new_folder

    require_new_folder(output)
    layers = export_adapter(run, output, merged=merged)
    what = "the model with its adapters merged" if merged else f"adapters of {layers} layers"
    echo(f"{output}: {what}", err=True)
    return 0


def export_adapter(run: Path, output: Path, *, merged: bool) -> int:
    """Write the files to `output`; the number of adapted layers. run: a run's folder, or its checkpoint.

    Raises HarnessError where there is no checkpoint with adapters.
    """
    folder = run if (run / DESCRIPTION).exists() else checkpoint_folder(run)
    if not (folder / DESCRIPTION).exists():
        raise HarnessError(
            f"'{run}' has no checkpoint; run with measure.checkpoint=neutral and measure.keep_checkpoint=true"
        )
    request = {"checkpoint": str(folder), "output": str(output), "merged": merged}
    done = ask_module("harness.rank.models.adapter_export", request=json.dumps(request))
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise HarnessError("".join(last) or "exporting the adapters failed without a message")
    return int(done.stdout)
