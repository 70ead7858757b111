"""Finds the runs that a person names: by id, by a part of it, by a file or folder, or as the latest."""

from __future__ import annotations

from pathlib import Path

from harness.backends.refusals import suggestion
from harness.cli.options.shared import warn_skipped
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.launch.owner import lines_about
from harness.record import Record
from harness.record.store import read_runs

LATEST = "latest"


def all_runs(folder: Path) -> list[tuple[Path, Record]]:
    """The readable runs of a folder or archive, oldest first; the others are named.

    Raises HarnessError where there is none.
    """
    if folder.is_dir():
        for line in lines_about(folder):
            echo(line, err=True)
    found, unreadable = read_runs([folder])
    warn_skipped(unreadable)
    return sorted(found, key=lambda run: (run[1].created_at, run[1].run_id))


def one_run(given: str, folder: Path) -> tuple[Path, Record]:
    """The run that `given` names. Raises HarnessError if there is none, or several."""
    if Path(given).exists():
        found, _ = read_runs([Path(given)])
        return _only(given, found)
    runs = all_runs(folder)
    if given == LATEST:
        return runs[-1]
    same = [run for run in runs if run[1].run_id == given]
    found = same or [run for run in runs if given in run[1].run_id]
    if not found:
        ids = [record.run_id for _, record in runs]
        hint = suggestion(given, ids) or "`harness list` shows them"
        raise HarnessError(f"no run in '{folder}' has '{given}' in its name. {hint}")
    return _only(given, found)


def _only(given: str, found: list[tuple[Path, Record]]) -> tuple[Path, Record]:
    if len(found) > 1:
        first = ", ".join(record.run_id for _, record in found[:3])
        raise HarnessError(f"'{given}' names {len(found)} runs ({first}, ...); give more of the name")
    return found[0]
