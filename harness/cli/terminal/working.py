"""Says that a silent command works; loads nothing, so that its second begins before libraries load."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import click

from harness.launch import speaks_for_ranks

WORKING_AFTER = "HARNESS_WORKING_AFTER"
"""Environment variable: seconds without a word until a command says that it works; 0: it never does."""
SPOKEN = threading.Event()
"""Whether the command has printed something."""


def says_that_it_works() -> bool:
    """Whether a command that is silent says so."""
    return _after() > 0 and speaks_for_ranks()


def _after() -> float:
    return float(os.environ.get(WORKING_AFTER, "1"))


@contextlib.contextmanager
def working(command: str) -> Iterator[None]:
    """Say on standard error that a command works, if it prints nothing for a second."""
    after, ended = _after(), threading.Event()

    def wait() -> None:
        if not ended.wait(after) and not SPOKEN.is_set():
            with contextlib.suppress(OSError):
                click.echo(f"harness {command}: working", err=True)

    if says_that_it_works():
        threading.Thread(target=wait, name="working", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
