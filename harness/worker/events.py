"""Events from a rank to the launcher: one JSON object per line, appended as it happens."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from harness.nested import finite


class EventWriter:
    """Appends events to the rank's file; each line is complete before the next begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, kind: str, **values: Any) -> None:
        """Append one event. Floats that are not finite become null, as JSON has none."""
        line = json.dumps({"kind": kind, **finite(values)}) + "\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()
