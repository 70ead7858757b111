"""The parts of `harness slurm` that job scripts call; hidden from the help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import EXIT_GATE, PATH, common
from harness.cli.output import echo
from harness.fabric.gate import parse_rate, shortfall
from harness.fabric.result import FABRIC_NAME, read_fabric
from harness.slurm import attempt
from harness.slurm.exit_reason import ScriptEnd

_run_directory = click.argument("run_directory", type=PATH)


@click.command(hidden=True)
@_run_directory
@common
def begin(run_directory: Path) -> int:
    """For job scripts: note that an attempt at a run begins."""
    attempt.begin(run_directory)
    return 0


@click.command(hidden=True)
@_run_directory
@click.option("--exit-code", required=True, type=int)
@click.option("--ended", type=click.Choice(["time-limit", "terminated", "slow-fabric", "fabric-failed"]))
@click.option("--require-busbw", metavar="RATE")
@common
def finish(run_directory: Path, exit_code: int, ended: Any, require_busbw: str | None) -> int:
    """For job scripts: write the record of a run whose step has ended."""
    end = ScriptEnd(ended=ended, exit_code=exit_code, require_busbw=require_busbw)
    record = attempt.finish(run_directory, end)
    echo(f"{record.run_id}: {record.status}", err=True)
    return 0


@click.command(hidden=True)
@_run_directory
@click.argument("rate")
@common
def gate(run_directory: Path, rate: str) -> int:
    """For job scripts: check the result of the network's self-test."""
    missed = shortfall(read_fabric(run_directory / FABRIC_NAME), parse_rate(rate))
    if missed is None:
        return 0
    echo(f"harness: {missed}", err=True)
    return EXIT_GATE
