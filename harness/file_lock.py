"""Locks of files, which the kernel releases when their owner dies, however it dies."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What file systems without locks say."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock where the file system has locks."""
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            lock.release()
