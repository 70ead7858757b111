"""`harness slurm ...`: the options of each command; harness/slurm/commands.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import common, config_option, json_option, runs_option, set_option

_folder = click.argument("folder", type=click.Path(path_type=Path))


@click.group()
def slurm() -> None:
    """Run a matrix of cells as Slurm jobs."""


@slurm.command()
@click.option("--site", required=True, type=click.Path(path_type=Path), help="YAML file of the cluster.")
@config_option
@click.option("--backends", help="Comma-separated names with their options, or all.")
@click.option("--nodes", default="1", show_default=True, help="Numbers of nodes, comma-separated: 1,2,4.")
@click.option("--nproc", type=click.IntRange(1), help="Ranks per node; without it the GPUs of a node, or 2.")
@click.option("--repeats", type=click.IntRange(1), help="Runs of each cell.")
@set_option
@runs_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("jobs"), show_default=True,
    help="New folder of the scripts.",
)  # fmt: skip
@click.option("--job-name", default="harness", show_default=True, help="Begin of the jobs' names.")
@click.option("--array", "arrays", is_flag=True, help="One job array per number of nodes.")
@click.option("--time", "time_limit", help="Time limit of a cell instead of the site's.")
@click.option("--fresh", is_flag=True, help="Render every cell, also those that have a record.")
@common
def render(**arguments: Any) -> int:
    """Write the job scripts of backends x numbers of nodes x repeats."""
    from harness.slurm.commands import render as run

    return run(**arguments)


@slurm.command()
@_folder
@click.option("--wait", is_flag=True, help="Submit the rest as the queue empties, until all have a record.")
@click.option("--poll-seconds", type=click.FloatRange(0.1), default=10.0, show_default=True)
@json_option
@common
def submit(folder: Path, wait: bool, poll_seconds: float, as_json: bool) -> int:
    """Submit the runs of a rendered folder that were not submitted yet."""
    from harness.slurm.commands import submit as run

    return run(folder, wait=wait, poll_seconds=poll_seconds, as_json=as_json)


@slurm.command()
@_folder
@json_option
@common
def status(folder: Path, as_json: bool) -> int:
    """Show where each run is."""
    from harness.slurm.commands import status as run

    return run(folder, as_json=as_json)


@slurm.command()
@_folder
@click.option("--report", type=click.Path(path_type=Path), help="Write a markdown report here.")
@json_option
@common
def collect(folder: Path, report: Path | None, as_json: bool) -> int:
    """Give every run whose job is over its record, with what Slurm knows of it."""
    from harness.slurm.commands import collect_runs as run

    return run(folder, report=report, as_json=as_json)


@slurm.command()
@_folder
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@common
def cancel(folder: Path, run_ids: tuple[str, ...]) -> int:
    """Cancel the jobs of all runs, or of those named."""
    from harness.slurm.commands import cancel as run

    return run(folder, run_ids)


@slurm.command(hidden=True)
@click.argument("run_directory", type=click.Path(path_type=Path))
@common
def begin(run_directory: Path) -> int:
    """For job scripts: an attempt at a run begins."""
    from harness.slurm.commands import begin_run as run

    return run(run_directory)


@slurm.command(hidden=True)
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.option("--exit-code", required=True, type=int)
@click.option("--ended", type=click.Choice(["time-limit", "terminated", "slow-fabric", "fabric-failed"]))
@click.option("--require-busbw", metavar="RATE")
@common
def finish(run_directory: Path, exit_code: int, ended: Any, require_busbw: str | None) -> int:
    """For job scripts: the step of a run has ended."""
    from harness.slurm.commands import finish_run as run

    return run(run_directory, exit_code, ended, require_busbw)


@slurm.command(hidden=True)
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.argument("rate")
@common
def gate(run_directory: Path, rate: str) -> int:
    """For job scripts: judge what the self-test of the network wrote there."""
    from harness.fabric.commands import check
    from harness.fabric.result import FABRIC_NAME

    return check(run_directory / FABRIC_NAME, rate)
