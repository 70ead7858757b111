"""Reads the complete lines that a rank appended to its event file; skips and counts broken ones."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from harness.run_directory.events import Event, read_event


class Tail:
    """Remembers how far it has read."""

    broken_lines = 0
    """Lines read so far that are no event: a node that lost its power leaves such."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Events whose lines were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = data[:end].split(b"\n")[:-1]
        events = [event for line in lines if (event := _event(line)) is not None]
        self.broken_lines += len(lines) - len(events)
        return events


def _event(line: bytes) -> Event | None:
    try:
        return read_event(line)
    except ValidationError:
        return None
