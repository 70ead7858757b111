"""What `report` and `verify` do; printing through click, like cli.py."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from harness.cli import EXIT_STRICT
from harness.compare.fail_on import failures, parse_conditions
from harness.compare.rows import make_rows
from harness.compare.wording import counted
from harness.errors import HarnessError
from harness.report.manifest import Format
from harness.report.report import Run, format_of, write_report
from harness.store import RECORD_NAME, read_runs, try_writing, without_collection

LONGEST_NAME = 200
"""Bytes of a report's file name; file systems allow 255, of which names of tables and pictures need some."""
NOT_IN_TEX = '{}%#\\"\n'


@without_collection()
def report_runs(runs: Sequence[Path], output: Path, *, form: Format | None, fail_on: str | None) -> int:
    """`harness report`."""
    if fail_on is not None:
        raise HarnessError("--fail-on compares with a baseline; give --baseline and two sets of runs")
    form = form or format_of(output)
    found = _read(runs)
    require_writable(output, form)
    write_report(found, output, form=form, folders=_folders(runs))
    click.echo(f"{output}: {len(found)} records", err=True)
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
    write_report(after, output, form=form, baseline=before, folders=_folders(runs))
    click.echo(f"{output}: {len(before)} records before, {len(after)} after", err=True)
    failed = []
    if conditions:
        failed = failures(conditions, make_rows(r for _, r in before), make_rows(r for _, r in after))
    for line in failed:
        click.echo(f"fail-on: {line}", err=True)
    return EXIT_STRICT if failed else 0


@without_collection()
def verify_report(report: Path, *, pictures_by_digest: bool, as_json: bool) -> int:
    """`harness verify`: 0 if everything in the report follows from its records, else 1."""
    from harness.report.verify import verify

    result = verify(report, pictures_by_digest=pictures_by_digest)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=1, ensure_ascii=False))
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    for problem in result.problems:
        click.echo(str(problem), err=as_json)
    if result.problems:
        count = len(result.problems)
        click.echo(f"{report}: {counted(count, 'problem')}", err=True)
        return 1
    click.echo(f"{report}: holds; {result.summary}", err=as_json)
    return 0


def require_writable(report: Path, form: Format | None = None) -> None:
    """Say before hours of runs, not after them, that a report cannot be written."""
    form = form or format_of(report)
    length = len(os.fsencode(report.name))
    if length > LONGEST_NAME:
        raise HarnessError(
            f"report's file name has {length} bytes; at most {LONGEST_NAME} are allowed, as files beside it "
            "have longer names; give a shorter one"
        )
    refused = [character for character in NOT_IN_TEX if character in report.name]
    if refused and form == "latex":
        raise HarnessError(
            f"report's file name {report.name!r} holds {' '.join(map(repr, refused))}, which LaTeX does not "
            "allow in names of pictures; give another name"
        )
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        try_writing(report)
    except OSError as error:
        raise HarnessError(f"report '{report}' cannot be written: {error.strerror}") from error


def _read(paths: Sequence[Path]) -> list[Run]:
    found, unreadable = read_runs(paths)
    for problem in unreadable:
        click.echo(f"passed over: {problem}", err=True)
    return found


def _folders(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs that were given whole."""
    return [path for path in paths if path.is_dir() and not (path / RECORD_NAME).is_file()]
