"""Folders that one worker of pytest-xdist fills and every worker reads."""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

Made = TypeVar("Made")


class MadeOnce:
    """Of one session of tests, of one program, or of all sessions that share the folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._used: set[Path] = set()

    @contextmanager
    def place(self, name: str) -> Iterator[Path]:
        """A path that nobody else may use meanwhile; it exists if somebody made it before."""
        self._root.mkdir(parents=True, exist_ok=True)
        with FileLock(self._root / f"{name}.lock"):
            self._used.add(self._root / name)
            yield self._root / name

    def value(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, which is called once in the session."""
        with self.place(name) as path:
            if not path.exists():
                made = path.with_suffix(".new")
                made.write_bytes(pickle.dumps(make()))
                os.replace(made, path)
            return pickle.loads(path.read_bytes())

    @staticmethod
    def fill(place: Path, folder: Path) -> None:
        """Copy a folder to a path of `place`, all of it or nothing."""
        whole = place.with_suffix(".new")
        shutil.rmtree(whole, ignore_errors=True)  # of a session that was killed
        shutil.copytree(folder, whole, symlinks=True)
        whole.rename(place)

    def forget(self) -> None:
        """Remove what this process has used so far: it is made again when it is asked for next."""
        for path in self._used:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
