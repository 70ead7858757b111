"""Events from a rank to the launcher: one JSON object per line, appended as it happens."""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic_core import PydanticSerializationError

from harness.errors import HarnessError
from harness.run_directory.events import Event
from harness.safe_text import described


class EventWriter:
    """Appends events to the rank's file; each line is complete before the next begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append one event."""
        try:
            line = event.model_dump_json() + "\n"
        except PydanticSerializationError as error:
            what = f"what a rank reports ('{event.kind}') has no form in JSON"
            raise HarnessError(f"{what}: {described(error)}") from error
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()
