"""Folders that one worker of pytest-xdist fills and every worker reads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

Made = TypeVar("Made")


class MadeOnce:
    """Of one session of tests, or of one program."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def place(self, name: str) -> Iterator[Path]:
        """A path that nobody else may use meanwhile; it exists if somebody made it before."""
        self._root.mkdir(exist_ok=True)
        with FileLock(self._root / f"{name}.lock"):
            yield self._root / name

    def value(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, which is called once in the session."""
        with self.place(name) as path:
            if not path.exists():
                made = path.with_suffix(".new")
                made.write_bytes(pickle.dumps(make()))
                os.replace(made, path)
            return pickle.loads(path.read_bytes())
