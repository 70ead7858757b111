"""Notes which process runs a run, so that a run whose launcher was killed is recorded later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.atomic_write import write_atomically
from harness.errors import HarnessError
from harness.record import Record
from harness.record_files import RECORD_NAME
from harness.run_directory.assemble import assemble
from harness.run_directory.outcome import Outcome, Verdict
from harness.run_directory.owner import Owner
from harness.run_directory.request import RunRequest
from harness.run_directory.side_files import read_part
from harness.store import write_record

OWNER_NAME = "launcher.json"


def note_owner(run_directory: Path) -> None:
    """Note that this process runs the run."""
    write_atomically(run_directory / OWNER_NAME, Owner.myself().model_dump_json())


def forget_owner(run_directory: Path) -> None:
    """The run has its record."""
    with suppress(OSError):
        (run_directory / OWNER_NAME).unlink()


def without_record(runs: Path) -> Iterator[tuple[Path, Owner]]:
    """Folders of runs that were started and have no record, with who started them."""
    for path in sorted(runs.glob(f"*/{OWNER_NAME}")):
        owner = read_part(path, Owner)
        if owner is not None and not (path.parent / RECORD_NAME).exists():
            yield path.parent, owner


def record_abandoned(runs: Path) -> Iterator[Record]:
    """Write the record of every run whose launcher is gone, from what its ranks left."""
    for directory, owner in without_record(runs):
        if not owner.is_gone:
            continue
        cause = f"abandoned: its launcher (process {owner.process}) was killed, or the machine restarted,"
        outcome = Outcome(exit_codes={}, verdict=Verdict(status="failed", kind="LauncherLost", cause=cause))
        try:
            record = assemble(directory, RunRequest.read(directory), outcome)
            write_record(directory, record)
        except (OSError, ValueError, HarnessError):
            continue  # `lines_about` still names it
        forget_owner(directory)
        yield record


def lines_about(runs: Path) -> list[str]:
    """What a reader of these runs must know of those without a record."""
    lines = []
    for directory, owner in without_record(runs):
        if owner.is_gone:
            lines.append(
                f"run {directory.name} has no record: its launcher (process {owner.process}) is gone; "
                f"`harness compare` or `harness run` with --runs {runs} writes one"
            )
        else:
            lines.append(
                f"run {directory.name} has no record yet: process {owner.process} on {owner.host} runs it"
            )
    return lines
