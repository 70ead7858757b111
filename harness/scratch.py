"""Temporary folders that name their process, so that those of a killed one are removed by the next."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "harness-"
_NAME = re.compile(rf"{PREFIX}[a-z]+-(\d+)-\w+")


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed at the end; `purpose` is a word for its name.

    Folders of this kind that belong to this user and whose processes are gone are removed first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{purpose}-{os.getpid()}-") as folder:
        yield Path(folder)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*-*-*"):
        found = _NAME.fullmatch(folder.name)
        try:
            if found and not _lives(int(found[1])) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody else removed it


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
