"""Temporary folders that name their process, so that those of a killed one are removed by the next."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

PREFIX = "harness-"
LONGEST_PLACE = 40
"""Characters of the folder for temporary files: the path of a socket has at most 107 bytes."""
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


def name_multiprocessing_folder() -> None:
    """Have multiprocessing keep its sockets in such a folder too: its own name does not tell whose it is."""
    place = tempfile.gettempdir()
    if len(place) > LONGEST_PLACE:
        return
    _remove_abandoned(Path(place))
    before = tempfile.tempdir
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}sockets-{os.getpid()}-")
    tempfile.tempdir = folder
    try:
        chosen = util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    if Path(chosen).parent == Path(folder):
        # After multiprocessing itself, which removes its own with priority -100.
        util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    else:  # it had one already
        os.rmdir(folder)
