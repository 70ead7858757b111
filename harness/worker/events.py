"""Events from a rank to the launcher: one JSON object per line, appended as it happens."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.run_directory.events import Event


class EventWriter:
    """Appends events to the rank's file; each line is complete before the next begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append one event."""
        line = event.model_dump_json() + "\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()
