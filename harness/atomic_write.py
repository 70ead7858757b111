"""Writes files that others may read at the same moment. Imports nothing of the harness."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
STREAM_FOLDERS = ("/dev/fd", "/proc/self/fd")
"""What a shell connects, by name or by number."""


def stream_number(path: Path) -> int | None:
    """The file descriptor that /dev/stdout and its like name; None: another path."""
    text = str(path)
    if text in STREAMS:
        return STREAMS[text]
    return int(path.name) if str(path.parent) in STREAM_FOLDERS and path.name.isdecimal() else None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that a reader sees all of it or what was there before; text is UTF-8.

    A link keeps its place; what is no file is written to, /dev/stdout through its open descriptor: a pipe
    whose reader is gone could not be opened again. Raises OSError.
    """
    write_all_atomically({path: content})


def write_all_atomically(contents: Mapping[Path, str | bytes]) -> None:
    """The same for files that belong together: none is replaced before all of them are on the disk.

    Raises OSError with the name of the file that could not be written.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            if (number := stream_number(path)) is not None:
                with _named(path), os.fdopen(os.dup(number), "wb") as stream:
                    stream.write(data)
                continue
            if path.exists() and not path.is_file():
                with _named(path):
                    path.write_bytes(data)
                continue
            target = path.resolve()
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            written[temporary] = target
            with _named(path):
                temporary.write_bytes(data)
        for temporary, target in written.items():
            with _named(target):
                os.replace(temporary, target)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk names no file: add it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
