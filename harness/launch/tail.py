"""Reads the lines that a rank appends to its event file, whole lines only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """Remembers how far it has read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Events whose lines were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [json.loads(line) for line in data[:end].splitlines()]
