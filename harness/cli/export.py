"""`harness export ...`: measurements and settings for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.export_program import program
from harness.cli.options import PATH, common, warn_skipped
from harness.cli.output import echo


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
    from harness.judge.comparison import Comparison
    from harness.record.store import read_runs
    from harness.tracking import export_runs

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
    from harness.launch.adapter_export import export_adapter

    require_new_folder(output)
    layers = export_adapter(run, output, merged=merged)
    what = "the model with its adapters merged" if merged else f"adapters of {layers} layers"
    echo(f"{output}: {what}", err=True)
    return 0
