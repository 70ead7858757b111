"""Stays beside a rank that another launcher started: watches it, and can write its run's record for it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from harness.atomic_write import write_atomically
from harness.errors import HarnessError
from harness.launch.claim import claimed
from harness.launch.early_end import EarlyEnd, read_early_end, record_early_end, telling_why
from harness.launch.ending import adopt_orphans, die_with, kill_descendants
from harness.launch.watch import ANSWER_SECONDS, STATE_SIGNAL, Watch, is_stopped
from harness.record import Record
from harness.record.run_id import run_folder
from harness.record_files import RECORD_NAME
from harness.run_directory.assemble import assemble
from harness.run_directory.external_ends import (
    exits_before_stuck,
    external_outcome,
    has_gone,
    is_gone,
    wait_for_ends,
)
from harness.run_directory.owner import Owner
from harness.run_directory.rank_state import read_state
from harness.run_directory.remains import remove_remains
from harness.run_directory.request import RankExit, RunRequest, rank_exit, rank_file, rank_owner
from harness.run_directory.side_files import read_part
from harness.run_directory.stuck import STUCK_NAME, StuckNote, read_note
from harness.run_directory.tail import Tail
from harness.store import write_record

POLL_SECONDS = 0.25
ENDING_SECONDS = 5.0
"""Within these a rank that is told to end writes what it measured; launchers wait for 30 s."""
ASK_NAME = "where-are-you"
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

Become = Callable[[Callable[[str], None]], int]
"""Runs the rank; calls what it is given with the run's id once its folder is there."""


def supervise(rank: int, world_size: int, runs: Path, become: Become) -> Supervisor:
    """Run a rank in a child of this process and return when that has ended; the child never returns.

    Call this before anything starts threads or touches a device: the child is a fork.
    """
    adopt_orphans()
    parent, (reader, writer) = os.getpid(), os.pipe()
    # Held back until they can be passed on: one that arrives around the fork would end this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        die_with(parent, signal.SIGKILL)
        signal.signal(STATE_SIGNAL, signal.SIG_IGN)  # until the rank answers it
        os.close(reader)
        with telling_why(writer):
            code = become(lambda run_id: _tell(writer, run_id))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    os.set_blocking(reader, False)
    supervisor = Supervisor(rank, world_size, runs, child, reader)
    supervisor.wait()
    return supervisor


def _tell(writer: int, run_id: str) -> None:
    os.write(writer, run_id.encode())


@dataclass
class Supervisor:
    """Watches one rank; that of rank 0 watches the positions of all."""

    rank: int
    world_size: int
    runs: Path
    child: int
    reader: int
    directory: Path | None = None
    """None: the ranks have not agreed on a run yet."""
    code: int | None = None
    early_end: EarlyEnd | None = None
    """Why the rank ended before the ranks agreed on a run, if it said so."""
    _told_at: float | None = None
    _asked: bool = False
    _watch: Watch | None = None
    _tail: Tail | None = None

    def wait(self) -> None:
        """Pass signals on, answer and ask where the ranks are, and note how the child ended."""
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        while self.code is None:
            finished, status, usage = os.wait4(self.child, os.WNOHANG)
            if finished:
                self.code = os.waitstatus_to_exitcode(status)
                self._find_folder()
                self._note(usage.ru_maxrss * 1024)
                return
            self._look()
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        """End as the rank did."""
        kill_descendants()
        code = self.code or 0
        os._exit(code if code >= 0 else 128 - code)

    def missing_record(self) -> Record | None:
        """Write and return the record if nobody else does; None: there is one, or another rank writes it."""
        directory = self.directory
        if directory is None or self.code == 0:
            return None
        if self.rank != 0 and not (rank_file(directory, 0).exists() and is_gone(directory, 0)):
            return None
        note = read_note(directory)
        if note is None:
            wait_for_ends(directory, self.world_size)
        with claimed(directory, "record", lambda: None):
            if (directory / RECORD_NAME).exists():
                return None
            outcome = (
                external_outcome(directory, self.world_size)
                if note is None
                else exits_before_stuck(directory, note)
            )
            request = RunRequest.read(directory)
            record = assemble(directory, request, outcome)
            if note is not None:
                remove_remains(directory, request)
            write_record(directory, record)
        return record

    def early_record(self, make_request: Callable[[], RunRequest]) -> Record | None:
        """Write and return the record of a run that ended before its ranks agreed on it.

        `make_request`: of what this rank would have proposed. None: they agreed, a launcher ended this rank,
        another rank of this node was first, or there is nothing to propose.
        """
        if self.directory is not None or self.code in (0, None) or self._told_at is not None:
            return None
        with suppress(HarnessError):  # which the rank has printed
            return record_early_end(self.runs, make_request(), self.rank, self.code or 0, self.early_end)
        return None

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._told_at = self._told_at or time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.child, number)

    def _look(self) -> None:
        if self._told_at is not None and time.monotonic() > self._told_at + ENDING_SECONDS:
            os.kill(self.child, signal.SIGKILL)  # it is too stuck to say anything
        directory = self._find_folder()
        if directory is None:
            return
        if self._watch is not None and self._tail is not None:
            for event in self._tail.read():
                self._watch.note(event)
            if not self._asked and (note := self._watch.must_end()) is not None:
                self._end_stuck(directory, note)
        if self._asked and (directory / STUCK_NAME).exists():
            os.kill(self.child, signal.SIGKILL)  # its launcher may not hear of it: the network may be gone
        if not self._asked and (directory / ASK_NAME).exists():
            self._asked = True
            self._ask_own(directory)

    def _ask_own(self, directory: Path) -> None:
        """Have the own rank say where it is, or say that it is stopped."""
        if not is_stopped(self.child):
            os.kill(self.child, STATE_SIGNAL)
            return
        with suppress(OSError):  # a full disk: the rank is ended all the same
            write_atomically(_stopped_file(directory, self.rank), "")

    def _end_stuck(self, directory: Path, note: StuckNote) -> None:
        """Have every monitor ask its rank where it is, note the answers, and end the own rank."""
        with suppress(OSError):
            write_atomically(directory / ASK_NAME, note.reason)
        self._asked = True
        gone = [r for r in range(self.world_size) if has_gone(directory, r)]
        self._ask_own(directory)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(
            r in gone or self._has_answered(r) for r in range(self.world_size)
        ):
            time.sleep(POLL_SECONDS)
        stopped = [r for r in range(self.world_size) if _stopped_file(directory, r).exists()]
        unseen = [r for r in range(self.world_size) if not self._sees(r)]
        with suppress(OSError):
            note.model_copy(
                update={"stopped_ranks": stopped, "gone_ranks": gone, "unseen_ranks": unseen}
            ).write(directory)
        os.kill(self.child, signal.SIGKILL)

    def _has_answered(self, rank: int) -> bool:
        assert self.directory is not None
        return read_state(self.directory, rank).has_answered or _stopped_file(self.directory, rank).exists()

    def _sees(self, rank: int) -> bool:
        """Whether a rank's monitor has said in this folder who it is; nodes may have folders of their own."""
        return self.directory is not None and rank_owner(self.directory, rank).exists()

    def _find_folder(self) -> Path | None:
        if self.directory is None:
            with suppress(BlockingIOError):
                said = os.read(self.reader, select.PIPE_BUF).decode(errors="replace")
                if said.startswith("{"):
                    self.early_end = read_early_end(said)
                elif said:
                    self.directory = run_folder(self.runs, said)
                    self._begin(self.directory)
        return self.directory

    def _begin(self, directory: Path) -> None:
        with suppress(OSError):
            write_atomically(rank_owner(directory, self.rank), Owner.myself().model_dump_json())
        if self.rank == 0:
            request = RunRequest.read(directory)
            self._watch = Watch(directory, request, self._processes, self._sees)
            self._tail = Tail(rank_file(directory, 0))

    def _processes(self) -> dict[int, int] | None:
        """Process ids of the ranks, children of the monitors; None: not all of these are here and alive."""
        assert self.directory is not None
        found = {}
        for rank in range(self.world_size):
            owner = read_part(rank_owner(self.directory, rank), Owner)
            if owner is None or owner.host != socket.gethostname():
                return None
            with suppress(psutil.Error, IndexError):
                found[rank] = psutil.Process(owner.process).children()[0].pid
        return found if len(found) == self.world_size else None

    def _note(self, max_resident_bytes: int) -> None:
        if self.directory is None or not self.directory.exists() or self.code is None:
            return
        note = RankExit(exit_code=self.code, at=time.time(), max_resident_bytes=max_resident_bytes)
        with suppress(OSError):
            write_atomically(rank_exit(self.directory, self.rank), note.model_dump_json())


def _stopped_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.stopped"
