"""Ranks that torchrun, accelerate launch or srun started: recognised, watched and recorded."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout
from pydantic import ValidationError

from harness.errors import HarnessError
from harness.files import locked, refusing, write_atomically
from harness.launch import STOPPING
from harness.launch.ending import adopt_orphans, die_with, kill_descendants
from harness.launch.watch import ANSWER_SECONDS, STATE_SIGNAL, Watch, is_stopped
from harness.record import Record
from harness.record.store import RECORD_NAME, read_record, run_folder, write_record
from harness.run_directory import assemble
from harness.run_directory.events import FailureEvent, Tail, is_out_of_memory
from harness.run_directory.rank_state import STUCK_NAME, Owner, StuckNote, read_note, read_part, read_state
from harness.run_directory.request import RankExit, RunRequest, rank_exit, rank_file, rank_owner, stopped_file
from harness.safe_text import capped, described, encodable

MOST_MESSAGE_BYTES = 2048
"""Fits with its names into one write of a pipe, which is then whole."""


@contextmanager
def claimed(runs: Path, cell: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a cell; `on_wait` is called once if another process holds it.

    The kernel takes the lock from an owner that is gone. Where the file system has no locks, nothing is kept
    out. Raises HarnessError where the folder cannot be written.
    """
    path = runs / f".{cell}.lock"
    with ExitStack() as stack:
        with refusing(f"{path} cannot be written"):
            lock = stack.enter_context(locked(path, on_wait))
        try:
            yield
        finally:
            if lock.is_locked:
                # While it is held: who waits for it sees that it is gone, and makes its own.
                with suppress(OSError):
                    os.unlink(path)


def forget_dead_claims(runs: Path) -> None:
    """Remove the locks that killed comparisons left: nobody holds them."""
    for path in runs.glob(".*.lock"):
        lock = FileLock(path, fallback_to_soft=False)
        with suppress(Timeout, OSError):
            lock.acquire(timeout=0)
            with suppress(OSError):
                os.unlink(path)
            lock.release()


class OthersRecords:
    """Records that appear in a folder after a comparison has read it: those of another one."""

    def __init__(self, runs: Path, read: Iterable[Path]) -> None:
        """`read`: the files of the records that the comparison knows."""
        self._runs = runs
        self._known = set(read)
        self.found: dict[str, Record] = {}
        """By cell."""

    def of_cell(self, cell: str) -> Record | None:
        """The record of a cell that another comparison wrote meanwhile, unless that was interrupted."""
        for path in sorted({*self._runs.glob(f"*/{RECORD_NAME}")} - self._known):
            self._known.add(path)
            with suppress(HarnessError):
                record = read_record(path)
                if record.error is None or record.error.kind != "Interrupted":
                    self.found[record.cell] = record
        return self.found.get(cell)

    def is_own(self, path: Path) -> None:
        """This comparison wrote the record itself."""
        self._known.add(path)


POLL_SECONDS = 0.25
ENDING_SECONDS = 5.0
"""Within these a rank that is told to end writes what it measured; launchers wait for 30 s."""
ASK_NAME = "where-are-you"
Become = Callable[[Callable[[str], object]], int]
"""Runs the rank; calls what it is given with the run's id once its folder is there."""


def supervise(rank: int, world_size: int, runs: Path, become: Become) -> Supervisor:
    """Run a rank in a child of this process and return when that has ended; the child never returns.

    Call this before anything starts threads or touches a device: the child is a fork.
    """
    adopt_orphans()
    parent, (reader, writer) = os.getpid(), os.pipe()
    # Held back until they can be passed on: one that arrives around the fork would end this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        die_with(parent, signal.SIGKILL)
        signal.signal(STATE_SIGNAL, signal.SIG_IGN)  # until the rank answers it
        os.close(reader)
        try:
            code = become(lambda run_id: os.write(writer, run_id.encode()))
        except Exception as error:
            end = FailureEvent(
                status="oom" if is_out_of_memory(error) else "failed",
                error_kind=encodable(type(error).__name__),
                message=capped(described(error), MOST_MESSAGE_BYTES),
                at=time.time(),
                phase="start",
            )
            with suppress(OSError):
                os.write(writer, end.model_dump_json().encode())
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    os.set_blocking(reader, False)
    supervisor = Supervisor(rank, world_size, runs, child, reader)
    supervisor.wait()
    return supervisor


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
    exit_before_run: FailureEvent | None = None
    """Why the rank ended before the ranks agreed on a run, if it said so."""
    _told_at: float | None = None
    _asked: bool = False
    _watch: Watch | None = None
    _tail: Tail | None = None

    def wait(self) -> None:
        """Pass signals on, answer and ask where the ranks are, and note how the child ended."""

        def pass_on(number: int, _frame: FrameType | None) -> None:
            self._told_at = self._told_at or time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(self.child, number)

        for number in STOPPING:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        while self.code is None:
            finished, status, usage = os.wait4(self.child, os.WNOHANG)
            if finished:
                self.code = os.waitstatus_to_exitcode(status)
                self._find_folder()
                if self.directory is not None and self.directory.exists():
                    note = RankExit(
                        exit_code=self.code, at=time.time(), max_resident_bytes=usage.ru_maxrss * 1024
                    )
                    with suppress(OSError):
                        write_atomically(rank_exit(self.directory, self.rank), note.model_dump_json())
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
        if self.rank != 0 and not (rank_file(directory, 0).exists() and assemble.is_gone(directory, 0)):
            return None
        note = read_note(directory)
        if note is None:
            assemble.wait_for_ends(directory, self.world_size)
        with claimed(directory, "record", lambda: None):
            if (directory / RECORD_NAME).exists():
                return None
            outcome = (
                assemble.external_outcome(directory, self.world_size)
                if note is None
                else assemble.exits_before_stuck(directory, note)
            )
            request = RunRequest.read(directory)
            record = assemble.assemble(directory, request, outcome)
            if note is not None:
                assemble.clean_up(directory, request)
            write_record(directory, record)
        return record

    def early_record(self, make_request: Callable[[], RunRequest]) -> Record | None:
        """Write and return the record of a run that ended before its ranks agreed on it.

        Nothing but their launcher is common to the ranks, so the run is named after it.
        `make_request`: of what this rank would have proposed. None: they agreed, a launcher ended this rank,
        another rank of this node was first, or there is nothing to propose.
        """
        if self.directory is not None or self.code in (0, None) or self._told_at is not None:
            return None
        try:
            request = make_request()
        except HarnessError:  # which the rank has printed
            return None
        launcher = psutil.Process(os.getppid())
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        began = datetime.fromtimestamp(launcher.create_time(), UTC).strftime("%Y%m%d-%H%M%S")
        identity = f"{socket.gethostname()} {launcher.pid} {launcher.create_time()} {attempt}"
        what = [*request.run_id.split("-")[2:-1], hashlib.sha256(identity.encode()).hexdigest()[:6]]
        request = request.model_copy(update={"run_id": "-".join([began, *what])})
        directory = self.runs / request.run_id
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            return None
        request.write(directory)
        if self.exit_before_run is not None:
            rank_file(directory, self.rank).write_text(self.exit_before_run.model_dump_json() + "\n")
        outcome = assemble.Outcome(exit_codes={self.rank: self.code}, ended_at={self.rank: time.time()})
        record = assemble.assemble(directory, request, outcome)
        write_record(directory, record)
        return record

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
            write_atomically(stopped_file(directory, self.rank), "")

    def _end_stuck(self, directory: Path, note: StuckNote) -> None:
        """Have every monitor ask its rank where it is, note the answers, and end the own rank."""
        with suppress(OSError):
            write_atomically(directory / ASK_NAME, note.reason)
        self._asked = True
        gone = [r for r in range(self.world_size) if assemble.has_gone(directory, r)]
        self._ask_own(directory)
        deadline = time.monotonic() + ANSWER_SECONDS
        awaited = [r for r in range(self.world_size) if r not in gone]
        while time.monotonic() < deadline and not all(
            read_state(directory, r).has_answered or stopped_file(directory, r).exists() for r in awaited
        ):
            time.sleep(POLL_SECONDS)
        stopped = [r for r in range(self.world_size) if stopped_file(directory, r).exists()]
        unseen = [r for r in range(self.world_size) if not self._sees(r)]
        with suppress(OSError):
            note.model_copy(
                update={"stopped_ranks": stopped, "gone_ranks": gone, "unseen_ranks": unseen}
            ).write(directory)
        os.kill(self.child, signal.SIGKILL)

    def _sees(self, rank: int) -> bool:
        """Whether a rank's monitor has said in this folder who it is; nodes may have folders of their own."""
        return self.directory is not None and rank_owner(self.directory, rank).exists()

    def _find_folder(self) -> Path | None:
        if self.directory is None:
            with suppress(BlockingIOError):
                said = os.read(self.reader, select.PIPE_BUF).decode(errors="replace")
                if said.startswith("{"):
                    with suppress(ValidationError):
                        self.exit_before_run = FailureEvent.model_validate_json(said)
                elif said:
                    directory = self.directory = run_folder(self.runs, said)
                    with suppress(OSError):
                        write_atomically(rank_owner(directory, self.rank), Owner.myself().model_dump_json())
                    if self.rank == 0:
                        request = RunRequest.read(directory)
                        self._watch = Watch(directory, request, self._processes, self._sees)
                        self._tail = Tail(rank_file(directory, 0))
        return self.directory

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
