"""The command line: the only place that prints. Results go to standard output, the rest to standard error."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

from harness.cli_export import export
from harness.cli_fabric import fabric
from harness.cli_options import common
from harness.cli_options import config_option as _config
from harness.cli_options import json_option as _json
from harness.cli_options import port_option as _port
from harness.cli_options import runs_option as _runs
from harness.cli_options import set_option as _set
from harness.cli_slurm import slurm

EXIT_STRICT = 3


def main() -> None:
    """Entry point of the `harness` command."""
    # A launcher that is told to end must stop its ranks and write their record, as for Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    harness(prog_name="harness")


_trace = click.option("--trace", is_flag=True, help="Keep each rank's profiler trace (measure.trace=true).")


def _traced(assignments: tuple[str, ...], trace: bool) -> tuple[str, ...]:
    return (*assignments, "measure.trace=true") if trace else assignments


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sharding-harness")
def harness() -> None:
    """Run one fine-tuning job under every data-parallel sharding strategy and compare what happened."""


@harness.command()
@click.option("--backend", required=True, help="Name, with options after a colon: zero3:offload=cpu.")
@_config
@click.option("--nproc", type=click.IntRange(1), help="Ranks on this machine.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Machines.")
@_set
@_runs
@_port
@_trace
@_json
@common
def run(
    backend: str,
    config: Path | None,
    nproc: int | None,
    nodes: int,
    assignments: tuple[str, ...],
    runs: Path,
    port: int | None,
    trace: bool,
    as_json: bool,
) -> int:
    """Run one job under one backend and record it.

    Starts the ranks itself, or becomes one of them under torchrun or accelerate launch.
    """
    from harness.commands.run import run_once

    return run_once(
        backend=backend, config=config, nproc=nproc, nodes=nodes, assignments=_traced(assignments, trace),
        runs=runs, port=port, as_json=as_json,
    )  # fmt: skip


@harness.command()
@_config
@click.option("--backends", help="Comma-separated names with their options, or all.")
@click.option("--nproc", help="Numbers of ranks, comma-separated: 2,4.")
@click.option("--repeats", type=click.IntRange(1), help="Runs of each cell.")
@_set
@_runs
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write a report here; its ending tells the format."
)
@click.option("--fresh", is_flag=True, help="Run every cell, also those that have a record.")
@click.option("--strict", is_flag=True, help="Exit with 3 if a cell failed or parity failed.")
@_trace
@_json
@common
def compare(
    config: Path | None,
    backends: str | None,
    nproc: str | None,
    repeats: int | None,
    assignments: tuple[str, ...],
    runs: Path,
    report: Path | None,
    fresh: bool,
    strict: bool,
    trace: bool,
    as_json: bool,
) -> int:
    """Run the missing cells of backends x world sizes x repeats and compare them all."""
    from harness.commands.compare import compare_matrix

    return compare_matrix(
        config=config, backends=backends, nproc=nproc, repeats=repeats,
        assignments=_traced(assignments, trace),
        runs=runs, report=report, fresh=fresh, strict=strict, as_json=as_json,
    )  # fmt: skip


@harness.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "html", "csv", "json", "latex"]),
    help="Without it the name of the file tells.",
)
@click.option("--baseline", is_flag=True, help="RUNS are two: the same job before and after a change.")
@click.option(
    "--fail-on",
    metavar="CONDITIONS",
    help='With --baseline, exit with 3 if one is met: "peak_bytes>+5%,tokens_per_second<-3%".',
)
@common
def report(runs: tuple[Path, ...], output: Path, form: Any, baseline: bool, fail_on: str | None) -> int:
    """Write a report of records: files, run folders or folders of runs."""
    from harness.reporting import report_baseline, report_runs

    if baseline:
        return report_baseline(runs, output, form=form, fail_on=fail_on)
    return report_runs(runs, output, form=form, fail_on=fail_on)


@harness.command()
@click.argument("report", type=click.Path(path_type=Path))
@click.option(
    "--pictures-by-digest",
    is_flag=True,
    help="Where another matplotlib drew the pictures, accept those whose digest the report lists.",
)
@_json
@common
def verify(report: Path, pictures_by_digest: bool, as_json: bool) -> int:
    """Compute a report again from the records beside it; name every line that differs.

    Exit code 0 only if every table, sentence and picture follows from unchanged records.
    """
    from harness.reporting import verify_report

    return verify_report(report, pictures_by_digest=pictures_by_digest, as_json=as_json)


@harness.command()
@_json
@common
def backends(as_json: bool) -> int:
    """List the backends with their options and library versions."""
    from harness.commands.backends import list_backends

    return list_backends(as_json)


harness.add_command(export)
harness.add_command(fabric)
harness.add_command(slurm)


@harness.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Exit with 3 if the runs differ by more than noise.")
@_json
@common
def diagnose(first: Path, second: Path, strict: bool, as_json: bool) -> int:
    """Say why two runs of one job differ: give the folders of both.

    Names the settings in which they differ, the first step, the tensors and the ratio in which they part,
    or says that there is no difference beyond noise. Reruns both, and the reference where noise was not
    measured, on this machine.
    """
    from harness.diagnose.command import diagnose_runs

    return diagnose_runs(first, second, strict=strict, as_json=as_json)


@harness.command()
@click.option(
    "--backends", help="Comma-separated names to try, also of third parties; else all built-in ones."
)
@_json
@common
def doctor(backends: str | None, as_json: bool) -> int:
    """Say what this machine can run, which versions have known traps, and whether it can be trusted.

    Runs a tiny job under every backend that fits this machine and two minutes, and three planted defects;
    says what was not tried. Exits with 1 if something is off.
    """
    from harness.commands.arguments import split_backends
    from harness.doctor.command import examine

    named = split_backends(backends) if backends is not None else []
    return examine([] if named == ["all"] else named, as_json=as_json)


if __name__ == "__main__":
    main()
