"""Runs a command of the harness in a process of its own.

Ranks need a launcher that owns its process: signals, environment variables, a fork server. A notebook's
process stays as it was, and a record names the command line that repeats it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import IO, Any

from harness.errors import HarnessError
from harness.import_path import module_command, safe_environment

INTERRUPTED = 130
PATIENCE_SECONDS = 60.0
"""After an interrupt, until the ranks have ended and the record is written."""
PREFIX = "harness: "


def answer(words: Sequence[str], *, quiet: bool) -> Any:
    """The JSON document that `harness WORDS` prints; its standard error goes to ours as it comes.

    `quiet`: keep the progress back. Raises HarnessError with the command's one line, and KeyboardInterrupt.
    """
    process = subprocess.Popen(
        [*module_command("harness"), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
        env=safe_environment(),
    )  # fmt: skip
    said: list[str] = []
    with process, _passed_on(process.stderr, said, shows=not quiet), _interrupts_passed_on(process):
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode != 0:
        raise HarnessError(_reason(said, process.returncode))
    return json.loads(printed)


def assignments(settings: Mapping[str, Any] | None) -> list[str]:
    """The words that set each dotted setting to its value: JSON is YAML."""
    return [
        word
        for name, value in (settings or {}).items()
        for word in ("--set", f"{name}={json.dumps(value, default=str)}")
    ]


@contextlib.contextmanager
def _passed_on(stream: IO[str] | None, said: list[str], *, shows: bool) -> Iterator[None]:
    """Collect the lines of a stream and show them meanwhile."""
    assert stream is not None
    ours = sys.stderr

    def follow() -> None:
        for line in stream:
            said.append(line.rstrip("\n"))
            if shows and not line.startswith(PREFIX):  # an error is raised, not shown
                ours.write(line)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def _interrupts_passed_on(process: subprocess.Popen[str]) -> Iterator[None]:
    """A kernel's interrupt may reach this process alone; the command then ends its ranks, too."""
    try:
        yield
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
        raise


def _reason(said: Sequence[str], code: int) -> str:
    own = [line.removeprefix(PREFIX) for line in said if line.startswith(PREFIX)]
    return own[-1] if own else (said[-1] if said else f"the command ended with exit code {code}")
