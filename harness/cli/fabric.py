"""`harness fabric`: its options; harness/fabric/commands.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import common, json_option

_path = click.Path(path_type=Path)


@click.command()
@click.option("--nproc", type=click.IntRange(2), help="Ranks on this machine; under torchrun leave it out.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--max-size", help="Largest tensor; without it 4GB on GPUs, 64MB on the CPU, as memory allows.")
@click.option("--operations", help="Some of all_reduce,all_gather,reduce_scatter,broadcast,point_to_point.")
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True, help="Per timed batch.")
@click.option("--warmup", type=click.IntRange(1), default=5, show_default=True, help="Operations not timed.")
@click.option(
    "--seconds-per-row", type=click.FloatRange(0.001), default=5.0, show_default=True,
    help="Fewer repeats where one size would take longer.",
)  # fmt: skip
@click.option("--require-busbw", metavar="RATE", help="Exit with 3 if all-reduce has less: 5GB/s.")
@click.option("--output", type=_path, help="Keep the result in this file.")
@click.option("--plot", type=_path, help="Draw it: FILE.svg or FILE.png.")
@click.option("--silent", is_flag=True, hidden=True)
@json_option
@common
def fabric(**arguments: Any) -> int:
    """Measure the network under the collectives, and gate on its bus bandwidth.

    Starts ranks on this machine, or becomes one of them under torchrun.
    """
    from harness.fabric.commands import fabric as run

    return run(**arguments)
