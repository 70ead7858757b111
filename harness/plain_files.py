"""Which files are read and written: plain ones of a sensible size, not pipes and devices that never end."""

from __future__ import annotations

import os
from pathlib import Path

from harness.atomic_write import stream_number
from harness.bounds import MOST_CONFIGURATION_BYTES, MOST_SPARSE_BYTES
from harness.errors import HarnessError


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises OSError, also for what is no plain file or larger than allowed."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(None, "it is no plain file", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(None, f"it has {size:,} bytes; at most {most_bytes:,} are read", str(path))
        return file.read(most_bytes)


def read_settings(path: Path, what: str) -> str:
    """The text of a file of settings; `what` names its kind. Raises HarnessError."""
    try:
        return read_plain(path, MOST_CONFIGURATION_BYTES).decode("utf-8")
    except OSError as error:
        raise HarnessError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HarnessError(f"{what} {path} is not UTF-8 text") from error


def require_plain_input(path: Path, what: str) -> None:
    """Raise HarnessError for a pipe or device, which would be read for ever, and a file that is all holes."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise HarnessError(f"{what} '{path}' is a pipe or device; give a plain file or a folder")
        status = path.stat() if path.is_file() else None
    except (OSError, ValueError) as error:  # a loop of links, a name that is none
        raise HarnessError(
            f"{what} '{path}' cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if status is not None and MOST_SPARSE_BYTES < status.st_size > 100 * 512 * status.st_blocks:
        raise HarnessError(
            f"{what} '{path}' has {status.st_size:,} bytes, of which {512 * status.st_blocks:,} are on the "
            "disk; give a file that is not sparse"
        )


def require_plain_output(path: Path, what: str) -> None:
    """Raise HarnessError for a link, and a pipe or device that is not standard output or of the shell."""
    if stream_number(path) is not None:
        return
    if path.is_symlink():
        raise HarnessError(f"{what} '{path}' is a symbolic link; give the file itself that is to be written")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise HarnessError(f"{what} '{path}' is a pipe or device; give a file, or /dev/stdout")
