"""Reads the small files that a run leaves next to its events, as far as a power loss left them readable."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.plain_files import read_plain
from harness.safe_text import MOST_LOG_TAIL_BYTES, capped_tail, redacted

Model = TypeVar("Model", bound=BaseModel)
LOG_TAIL_LINES = 40
MOST_LOG_BYTES = 2**20
"""Of a log, its end."""
_FILE_OF_TRACEBACK = re.compile(r'(?<=\bFile ")[^"\n]+(?=", line \d)')


def read_part(path: Path, kind: type[Model]) -> Model | None:
    """What a file holds; None: it is not there, or cannot be read, or is something else."""
    try:
        return kind.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except (OSError, ValidationError):
        return None


def read_log(path: Path) -> str:
    """The end of a log, which may be as long as a disk; empty where there is none that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            return file.read(MOST_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def log_tail(log: Path) -> str:
    """The last lines of a log; empty where there is none that can be read.

    Files in a traceback are named from where Python finds them, 'torch/nn/functional.py': a record is read
    and published where nobody knows the folders of the machine that wrote it.
    """
    tail = "\n".join(read_log(log).splitlines()[-LOG_TAIL_LINES:])
    return capped_tail(shown_text(tail), MOST_LOG_TAIL_BYTES)


def shown_text(text: str) -> str:
    """Text of a rank as a record keeps it: no secrets, and no folders of the machine."""
    return redacted(_FILE_OF_TRACEBACK.sub(lambda file: _within_root(file[0]), text))


def _within_root(file: str) -> str:
    root = next((root for root in _import_roots() if file.startswith(root)), "")
    return file[len(root) :]


@lru_cache
def _import_roots() -> list[str]:
    """Folders that Python imports from, each with its slash, the innermost first."""
    checkout = str(Path(__file__).parents[2])
    folders = {checkout, *(entry for entry in sys.path if entry and Path(entry).is_dir())}
    return sorted((f"{folder.rstrip('/')}/" for folder in folders), key=len, reverse=True)
