"""Reads the small files that a run leaves beside its events, as far as a pulled plug left them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None: it is not there, or cannot be read, or is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_log(path: Path) -> str:
    """The text of a log; empty where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
