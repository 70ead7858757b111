"""Keeps two comparisons on one folder from running the same cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import HarnessError
from harness.file_lock import NO_LOCKS
from harness.record import Record
from harness.record_files import RECORD_NAME
from harness.store import read_record

POLL_SECONDS = 0.5


@contextmanager
def claimed(runs: Path, cell: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a cell; `on_wait` is called once if another process holds it.

    The kernel takes the lock from an owner that is gone. Where the file system has no locks, nothing is kept
    out. Raises HarnessError where the folder cannot be written.
    """
    path = runs / _name(cell)
    lock = FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire(poll_interval=POLL_SECONDS)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise HarnessError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                os.unlink(path)  # while it is held: who waits for it sees that it is gone, and makes its own
        lock.release()


def forget_dead_claims(runs: Path) -> None:
    """Remove the locks that killed comparisons left: nobody holds them."""
    for path in runs.glob(_name("*")):
        lock = FileLock(path, fallback_to_soft=False)
        with suppress(Timeout, OSError):
            lock.acquire(timeout=0)
            with suppress(OSError):
                os.unlink(path)
            lock.release()


def _name(cell: str) -> str:
    return f".{cell}.lock"


class OthersRecords:
    """Records that appear in a folder after a comparison has read it: those of another one."""

    def __init__(self, runs: Path, read: Iterable[Path]) -> None:
        """`read`: the files of the records that the comparison knows."""
        self._runs = runs
        self._known = set(read)
        self.found: dict[str, tuple[Path, Record]] = {}
        """By cell."""

    def of_cell(self, cell: str) -> tuple[Path, Record] | None:
        """The record of a cell that another comparison wrote meanwhile, unless that was interrupted."""
        for path in sorted(set(self._files()) - self._known):
            self._known.add(path)
            with suppress(HarnessError):
                record = read_record(path)
                if record.error is None or record.error.kind != "Interrupted":
                    self.found[record.cell] = path, record
        return self.found.get(cell)

    def is_own(self, path: Path) -> None:
        """This comparison wrote the record itself."""
        self._known.add(path)

    def _files(self) -> Iterator[Path]:
        return self._runs.glob(f"*/{RECORD_NAME}")
