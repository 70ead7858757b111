"""What a rank tells its launcher: events, one JSON object per line of its file, appended as they happen; and
what a process that answers a question says meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError

from harness.errors import HarnessError
from harness.run_directory.events import Event
from harness.safe_text import described, redacted


class EventWriter:
    """Appends events to the rank's file; each line is complete before the next begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        line = _line(event)
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


class GuestEventWriter:
    """Appends events in a process of a script, which may close any descriptor and use its number again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Append one event, without secrets: those of a script's configuration are not known before."""
        line = _line(event)
        data = (line if event.kind == "step" else redacted(line)).encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


def _line(event: Event) -> str:
    try:
        return event.model_dump_json() + "\n"
    except PydanticSerializationError as error:
        what = f"what a rank reports ('{event.kind}') has no JSON form"
        raise HarnessError(f"{what}: {described(error)}") from error


_send: Callable[[Any], None] | None = None


def tell_through(send: Callable[[Any], None]) -> None:
    """Have what is told reach the launcher."""
    global _send
    _send = send


def tell(text: str) -> None:
    """A line for the person who waits; a rank, whose launcher asked nothing, keeps it."""
    if _send is not None:
        _send({"note": text})


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name code of the user's own while it runs: it may end the process, or never return."""
    if _send is not None:
        _send({"doing": what})
    yield
    if _send is not None:
        _send({"doing": None})
