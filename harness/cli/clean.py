"""`harness clean`: removes runs that nothing needs any more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from harness.bounds import MOST_REPORT_BYTES
from harness.cli.options.shared import PATH, common, json_option
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.files import read_plain
from harness.judge.run_conditions import began_at
from harness.judge.wording import counted
from harness.launch.owner import without_record
from harness.record import Record
from harness.record.store import Store
from harness.tell.formats import megabytes
from harness.tell.manifest import read_manifest

UNFINISHED = ("failed", "timeout")
MOST_DAYS = 36_500
REPORTS = ("*.md", "*.html", "*.csv", "*.json", "*.tex")


@click.command()
@click.argument("runs", type=PATH, default=Path("runs"))
@click.option(
    "--older-than", type=click.FloatRange(0, MOST_DAYS), metavar="DAYS", help="Also runs older than this."
)
@click.option("--reports", is_flag=True, help="Also runs that a report in this folder lists.")
@click.option("--yes", is_flag=True, help="Remove them; without it they are listed only.")
@json_option
@common
def clean(runs: Path, older_than: float | None, reports: bool, yes: bool, as_json: bool) -> int:
    """Remove runs that no comparison would reuse: failed, stopped or replaced by a later run.

    RUNS is a folder of runs; default: runs. Without --yes nothing is removed.
    """
    if not runs.is_dir():
        raise HarnessError(f"'{runs}' is not a folder of runs; give the one that --runs named")
    found, _ = Store(runs).runs()
    listed = set() if reports else _in_reports(runs)
    reasons = dict(_removable(runs, found, older_than))
    kept = [folder for folder in reasons if folder.resolve() in listed]
    removed = [folder for folder in reasons if folder not in kept]
    sizes = {folder: _size(folder) for folder in removed}
    if yes:
        for folder in removed:
            if folder.is_symlink():  # to a run that lies elsewhere, and stays
                folder.unlink()
            else:
                shutil.rmtree(folder)
    if as_json:
        documents = [{"run_id": f.name, "why": reasons[f], "bytes": sizes[f]} for f in removed]
        echo(json.dumps({"removed": yes, "runs": documents}, indent=1))
    else:
        for folder in removed:
            echo(f"{folder.name}: {reasons[folder]}, {megabytes(sizes[folder])} MB")
    what = f"{counted(len(removed), 'run')}, {megabytes(sum(sizes.values()))} MB"
    echo(f"removed {what}" if yes else f"{what} to remove; --yes removes them", err=True)
    if kept:
        echo(f"{counted(len(kept), 'run')} kept for a report in {runs}; --reports removes them too", err=True)
    return 0


def _removable(
    root: Path, found: Sequence[tuple[Path, Record]], older_than: float | None
) -> Iterator[tuple[Path, str]]:
    """Folders with the reason; `found`: oldest first."""
    last = {record.cell: path for path, record in found if record.status not in UNFINISHED}
    oldest = None if older_than is None else datetime.now(UTC) - timedelta(days=older_than)
    for path, record in found:
        if record.status in UNFINISHED:
            yield path.parent, record.status
        elif last[record.cell] != path:
            yield path.parent, "replaced by a later run"
        elif oldest is not None and (began := began_at(record)) is not None and began < oldest.timestamp():
            yield path.parent, f"older than {older_than:g} days"
    for folder, owner in without_record(root):
        if owner.is_gone:
            yield folder, "without a record: its launcher is gone"


def _in_reports(folder: Path) -> set[Path]:
    """Folders of the runs that the reports in a folder list."""
    found: set[Path] = set()
    for path in (path for pattern in REPORTS for path in folder.glob(pattern)):
        try:
            manifest = read_manifest(read_plain(path, MOST_REPORT_BYTES).decode(), path).manifest
        except (HarnessError, OSError, UnicodeDecodeError):
            continue
        found |= {(folder / entry.path).parent.resolve() for entry in manifest.records}
    return found


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
