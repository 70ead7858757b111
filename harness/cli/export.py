"""`harness export ...`: what was measured or configured, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import common


@click.group()
def export() -> None:
    """Hand records over to other tools."""


@export.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["tensorboard", "mlflow", "wandb"]), help="The tool.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder that the tool writes into."
)
@common
def tracking(runs: tuple[Path, ...], to: Any, output: Path) -> int:
    """Log records to TensorBoard, MLflow or Weights & Biases (offline), one run each."""
    from harness.compare.comparison import Comparison
    from harness.store import read_runs
    from harness.tracking import export_runs

    found, unreadable = read_runs(runs)
    for problem in unreadable:
        click.echo(f"passed over: {problem}", err=True)
    count = export_runs(Comparison(record for _, record in found), to, output)
    click.echo(f"{output}: {count} of {len(found)} runs logged for {to}", err=True)
    return 0
