"""Notes which process runs a run: one whose launcher was killed is recorded later; jobs may start again."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.errors import HarnessError
from harness.files import write_atomically
from harness.record import Record
from harness.record.store import RECORD_NAME, write_record
from harness.run_directory.assemble import Outcome, Verdict, assemble, clean_up
from harness.run_directory.observed_record import REQUEST_NAME as OBSERVED
from harness.run_directory.observed_record import record_of_abandoned
from harness.run_directory.rank_state import Owner, read_part
from harness.run_directory.request import RANK_OWNERS, RunRequest

OWNER_NAME = "launcher.json"
_OWN_NAME = re.compile(r"\d{8}-\d{6}-.+-n\d+-r\d+-[0-9a-f]{6}")
BEGIN_SECONDS = 60.0
"""An empty folder older than this is not one that a launcher is about to fill."""
RESERVED_BYTES = 4096
"""Of that file: what replaces it needs no room on a full disk, and no new file where none can be made."""


class Launcher(Owner):
    outcome: Outcome | None = None
    """None: it has not seen the end of the ranks."""


def note_owner(run_directory: Path) -> None:
    text = Owner.myself().model_dump_json()
    write_atomically(run_directory / OWNER_NAME, text.ljust(RESERVED_BYTES))


def keep_outcome(run_directory: Path, outcome: Outcome) -> None:
    """Keep how the ranks ended, for the next command to write the record that could not be written now."""
    note = Launcher(**Owner.myself().model_dump(), outcome=outcome)
    with suppress(OSError), (run_directory / OWNER_NAME).open("r+b") as file:
        file.write(note.model_dump_json().ljust(RESERVED_BYTES).encode())


def forget_owner(run_directory: Path) -> None:
    """The run has its record. A note that cannot be removed is emptied: it would be recorded again."""
    note = run_directory / OWNER_NAME
    with suppress(OSError):
        try:
            note.unlink()
        except PermissionError:
            os.truncate(note, 0)


def without_record(runs: Path) -> Iterator[tuple[Path, Launcher]]:
    """Folders of runs that were started and have no record, with who started them.

    Of runs that another launcher started, the one of its ranks' monitors that lives, or else the first.
    """
    noted = (path for name in (OWNER_NAME, RANK_OWNERS) for path in runs.glob(f"*/{name}"))
    for directory in sorted({path.parent for path in noted}):
        if (directory / RECORD_NAME).exists():
            continue
        paths = [directory / OWNER_NAME, *sorted(directory.glob(RANK_OWNERS))]
        owners = [owner for path in paths if (owner := read_part(path, Launcher)) is not None]
        alive = [owner for owner in owners if not owner.is_gone]
        if owners:
            yield directory, (alive or owners)[0]


def forget_never_begun(runs: Path) -> None:
    """Remove the folders of runs whose launcher was killed before it asked anything of ranks."""
    for directory in runs.glob("*"):
        if not (_OWN_NAME.fullmatch(directory.name) and directory.is_dir()):
            continue
        names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
        owner = read_part(directory / OWNER_NAME, Launcher)
        is_old = time.time() - directory.stat().st_mtime > BEGIN_SECONDS
        if (names == {OWNER_NAME} and owner is not None and owner.is_gone) or (not names and is_old):
            shutil.rmtree(directory, ignore_errors=True)


def record_abandoned(runs: Path) -> Iterator[Record]:
    """Write the record of every run whose launcher is gone, from what its ranks left."""
    for directory, owner in without_record(runs):
        if not owner.is_gone or not (directory / OWNER_NAME).exists():
            continue
        try:
            if (directory / OBSERVED).exists():
                write_record(directory, record := record_of_abandoned(directory))
                forget_owner(directory)
                yield record
                continue
            request = RunRequest.read(directory)
            cause = f"abandoned: its launcher (process {owner.process}) was killed, or the machine restarted,"
            lost = Verdict(status="failed", kind="LauncherLost", cause=cause)
            record = assemble(directory, request, owner.outcome or Outcome(exit_codes={}, verdict=lost))
            clean_up(directory, request)
            write_record(directory, record)
        except (OSError, ValueError, HarnessError):
            continue  # `lines_about` still names it
        forget_owner(directory)
        for cut_short in directory.glob(".*"):
            cut_short.unlink(missing_ok=True)
        yield record


def lines_about(runs: Path) -> Iterator[str]:
    """What a reader of these runs must know of those without a record."""
    for directory, owner in without_record(runs):
        has_none = f"run {directory.name} has no record"
        if owner.is_gone and not (directory / OWNER_NAME).exists():
            yield (
                f"{has_none}: its ranks and their monitors (process {owner.process}) were killed; start it "
                "again, or remove it with `harness clean`"
            )
        elif owner.is_gone:
            yield (
                f"{has_none}: its launcher (process {owner.process}) is gone; `harness compare` or "
                f"`harness run` with --runs {runs} writes one"
            )
        else:
            yield f"{has_none} yet: process {owner.process} on {owner.host} runs it"


def requeued_job() -> str | None:
    """Number of the job that this process runs in if Slurm has started it before, else None.

    Slurm sets SLURM_RESTART_COUNT after a requeue only, and the job keeps its number.
    """
    return os.environ.get("SLURM_JOB_ID") if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else None


def made_in_job(record: Record, job: str) -> bool:
    """Whether an attempt of this job made the record."""
    return record.environment.variables.get("SLURM_JOB_ID") == job
