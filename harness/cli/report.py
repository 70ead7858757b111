"""`harness report`: writes a report of records, or of those before and after a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from harness.cli.options.price import given_price, price_option
from harness.cli.options.shared import EXIT_STRICT, OUTPUT_FILE, PATH, common, warn_skipped
from harness.cli.terminal.output import begin, echo
from harness.errors import HarnessError
from harness.files import stream_number
from harness.job.experiment import Price, ReportFocus
from harness.judge.changes import failures, parse_conditions
from harness.judge.comparison import Comparison
from harness.launch.owner import lines_about
from harness.record.record_files import ARCHIVE_NAME, is_folder_of_runs, place_of_runs
from harness.record.store import archive_runs, read_runs, without_collection
from harness.tell.manifest import Format
from harness.tell.report import (
    Run,
    format_of,
    prepare_report,
    require_writable,
    without_odd_runs,
    write_report,
)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("-o", "--output", required=True, type=OUTPUT_FILE, help="File to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "html", "csv", "json", "latex"]),
    help="Format; default: follows from the extension.",
)
@click.option(
    "--question",
    type=click.Choice(get_args(ReportFocus)),
    help="What the report answers; default: compare.question of the records.",
)
@click.option("--subject", default="", help="What the title adds to the job, such as the speed of its links.")
@price_option
@click.option("--baseline", is_flag=True, help="Compare two RUNS: the same job before and after a change.")
@click.option(
    "--fail-on",
    metavar="CONDITIONS",
    help='With --baseline, exit with 3 if a condition is met: "peak_bytes>+5%,tokens_per_second<-3%".',
)
@click.option(
    "--archive",
    is_flag=True,
    help="Pack the records into runs.tar.xz next to the report, which then refers to them there.",
)
@common
def report(
    runs: tuple[Path, ...],
    output: Path,
    form: Any,
    question: Any,
    subject: str,
    price_per_gpu_hour: str | None,
    baseline: bool,
    fail_on: str | None,
    archive: bool,
) -> int:
    """Write a report of records: files, run folders, folders of runs, or archives (runs.tar.xz)."""
    begin("reading the records")
    if baseline and archive:
        raise HarnessError("--archive packs one set of runs; with --baseline give two archives as RUNS")
    if baseline and (question or subject or price_per_gpu_hour):
        raise HarnessError(
            "--question, --subject and --price-per-gpu-hour exclude --baseline, which shows what changed"
        )
    if baseline:
        return report_baseline(runs, output, form=form, fail_on=fail_on)
    return report_runs(
        runs, output, form=form, question=question, subject=subject, price=given_price(price_per_gpu_hour),
        fail_on=fail_on, archive=archive,
    )  # fmt: skip


@without_collection()
def report_runs(
    runs: Sequence[Path],
    output: Path,
    *,
    form: Format | None,
    question: ReportFocus | None,
    subject: str,
    price: Price | None,
    fail_on: str | None,
    archive: bool,
) -> int:
    """`harness report`."""
    if fail_on is not None:
        raise HarnessError("--fail-on compares with a baseline; give --baseline and two sets of runs")
    form = form or format_of(output)
    found = _read(runs, strict=archive)
    require_writable(output, form)
    folders = _folders(runs)
    if archive:
        folders = [output.parent / ARCHIVE_NAME]
        found = archive_runs(found, folders[0])
    try:
        write_report(
            found, output, form=form, question=question, subject=subject, price=price, folders=folders
        )
    except (HarnessError, OSError):
        raise
    except Exception:
        found = _showable(found, output, form)
        write_report(found, output, form=form, question=question, subject=subject, price=price)
    echo(f"{output}: {len(found)} records{_left_out(output, form)}", err=True)
    return 0


@without_collection()
def report_baseline(runs: Sequence[Path], output: Path, *, form: Format | None, fail_on: str | None) -> int:
    """`harness report A B --baseline`: 3 if a condition of `fail_on` is met."""
    if len(runs) != 2:
        raise HarnessError(
            f"--baseline compares two sets of runs, {len(runs)} given: first the baseline, then the other"
        )
    conditions = parse_conditions(fail_on) if fail_on is not None else []
    form = form or format_of(output)
    before, after = (_read([path]) for path in runs)
    require_writable(output, form)
    try:
        write_report(after, output, form=form, baseline=before, folders=_folders(runs))
    except (HarnessError, OSError):
        raise
    except Exception:
        before, after = (_showable(side, output, form) for side in (before, after))
        write_report(after, output, form=form, baseline=before)
    echo(f"{output}: {len(before)} records before, {len(after)} after", err=True)
    failed = []
    if conditions:
        failed = failures(conditions, Comparison(r for _, r in before), Comparison(r for _, r in after))
    for line in failed:
        echo(f"fail-on: {line}", err=True)
    return EXIT_STRICT if failed else 0


def _left_out(output: Path, form: Format) -> str:
    if stream_number(output) is None or form in ("html", "json"):
        return ""
    return "; pictures and tables next to it are left out: give a file, or --format html"


def _read(paths: Sequence[Path], *, strict: bool = False) -> list[Run]:
    for folder in filter(Path.is_dir, paths):
        for line in lines_about(folder):
            echo(line, err=True)
    found, unreadable = read_runs(paths)
    if strict and unreadable:
        raise HarnessError(f"--archive needs readable records; fix or remove: {unreadable[0]}")
    warn_skipped(unreadable)
    return found


def _showable(found: Sequence[Run], output: Path, form: Format) -> list[Run]:
    """Those that a report can show; the others are named."""
    sound, odd = without_odd_runs(found, lambda some: prepare_report(some, output, form=form))
    warn_skipped(odd)
    return sound


def _folders(runs: Sequence[Path]) -> list[Path]:
    """Folders and archives whose every record was asked for."""
    return list(filter(is_folder_of_runs, map(place_of_runs, runs)))
