"""Names of runs, which become names of folders: checked here, wherever one is made into a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from harness.errors import HarnessError

LONGEST_NAME = 200
"""Bytes; file systems allow 255, of which temporary names need some."""
ALLOWED = (
    f"the name of one folder or file: at most {LONGEST_NAME} bytes, without slashes, backslashes and "
    "control characters, and without a dot in front"
)
_NOT_IN_NAMES = re.compile(r"[/\\]")


def plain_name(name: str) -> str:
    """The name itself. Raises ValueError if it could lead out of the folder in which it stands."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 0
    if (
        not 0 < length <= LONGEST_NAME
        or name[0] == "."
        or not name.isprintable()
        or _NOT_IN_NAMES.search(name)
    ):
        raise ValueError(f"it must be {ALLOWED}")
    return name


PlainName = Annotated[str, AfterValidator(plain_name)]
RunId = PlainName


def run_folder(root: Path, run_id: str) -> Path:
    """The folder of a run within `root`. Raises HarnessError for a run id that is no plain name."""
    try:
        return root / plain_name(run_id)
    except ValueError as error:
        shown = run_id if len(run_id) <= LONGEST_NAME else f"{run_id[:LONGEST_NAME]}..."
        raise HarnessError(f"run id {shown!r} is refused as a path: {error}") from error


def as_name(text: str) -> str:
    """A text as part of a run id: whatever could be misread as a path or by a shell becomes '_'."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)[:60]
