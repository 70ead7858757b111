"""Processes of an observed command: which rank each of them is, and how it ended.

Each has a file named by its number. It notes its start there itself; its end is noted by the process that
waits for it (see `launch/bootstrap/sitecustomize.py`), a line of JSON each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from harness.run_directory.rank_state import Owner, read_log
from harness.run_directory.request import RankExit

PATIENCE_SECONDS = 2.0
"""A launcher that was killed may be gone a little before its ranks."""


class ProcessStart(Owner):
    """A process that has imported torch."""

    rank: int | None
    """As the launcher's variables say, and once it trains as it is recorded; None: not known."""
    trains: bool = False
    """Whether the events of that rank are those of this process."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """What is known of the end of a rank's process."""

    start: ProcessStart
    exit_code: int | None = None
    """Negative: killed by that signal. None: it runs, or nobody noted its end."""
    at: float | None = None
    """When its end was first noted, seconds since the epoch."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None and not self.start.is_gone


def processes_folder(run_directory: Path) -> Path:
    """Where the files of the processes lie."""
    return run_directory / "processes"


def note_start(run_directory: Path, rank: int | None, *, trains: bool) -> None:
    """Note that this process is this rank."""
    start = ProcessStart(**Owner.myself().model_dump(), rank=rank, trains=trains)
    folder = processes_folder(run_directory)
    folder.mkdir(exist_ok=True)
    with (folder / str(start.process)).open("a" if trains else "w", encoding="utf-8") as file:
        file.write(start.model_dump_json() + "\n")


def note_end(run_directory: Path, process: int, exit_code: int) -> None:
    """Note the end of a process; nothing where it has not noted its start."""
    path = processes_folder(run_directory) / str(process)
    if path.exists():
        end = RankExit(exit_code=exit_code, at=time.time())
        with path.open("a", encoding="utf-8") as file:
            file.write(end.model_dump_json() + "\n")


def rank_ends(run_directory: Path) -> dict[int, RankEnd]:
    """By rank, the end of the process that trained, the last one where ranks were restarted.

    Of a rank that never trained, of the first process: workers that it starts have its variables too.
    """
    found: dict[int, RankEnd] = {}
    for end in _ends(run_directory):
        rank = end.start.rank
        if rank is None:
            continue
        known = found.get(rank)
        if known is None or _precedence(end.start) < _precedence(known.start):
            found[rank] = end
    return found


def wait_for_processes(run_directory: Path) -> None:
    """Return when no rank runs any more, or after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(end.is_running for end in rank_ends(run_directory).values()):
        time.sleep(0.05)


def _precedence(start: ProcessStart) -> tuple[bool, float]:
    return not start.trains, -start.started if start.trains else start.started


def _ends(run_directory: Path) -> Iterator[RankEnd]:
    for path in sorted(processes_folder(run_directory).glob("[0-9]*")):
        end: RankEnd | None = None
        for line in read_log(path).splitlines():
            try:
                end = RankEnd(start=ProcessStart.model_validate_json(line))
            except ValidationError:
                end = _with_exit(end, line)
        if end is not None:
            yield end


def _with_exit(end: RankEnd | None, line: str) -> RankEnd | None:
    """Of a line that was cut short nothing is known."""
    try:
        noted = RankExit.model_validate_json(line)
    except ValidationError:
        return end
    return end and replace(end, exit_code=noted.exit_code, at=end.at or noted.at)
