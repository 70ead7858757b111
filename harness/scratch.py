"""Temporary folders that name their process, so that those of a killed one are removed by the next.

A process is named with the namespace of its id: two containers on one machine may share a folder for
temporary files without seeing each other's processes.
"""

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
LONGEST_PLACE = 36
"""Characters of the folder for temporary files: the path of a socket has at most 107 bytes."""
_NAME = re.compile(rf"{PREFIX}[a-z]+-([0-9a-f]+)-(\d+)-\w+")


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed at the end; `purpose` is a word for its name.

    Folders of this kind that belong to this user and whose processes are gone are removed first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(purpose)) as folder:
        yield Path(folder)


def process_namespace() -> str:
    """Where process ids count, in hexadecimal: each container has its own. '0': unknown."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def scratch_prefix(purpose: str) -> str:
    """Of the name of a folder that belongs to this process."""
    return f"{PREFIX}{purpose}-{process_namespace()}-{os.getpid()}-"


def _remove_abandoned(place: Path) -> None:
    here = process_namespace()
    for folder in place.glob(f"{PREFIX}*-{here}-*-*"):
        found = _NAME.fullmatch(folder.name)
        try:
            if found and not _lives(int(found[2])) and folder.lstat().st_uid == os.getuid():
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
    folder = tempfile.mkdtemp(prefix=scratch_prefix("mp"))
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
