"""Prints what people and programs read: no terminal escapes, no secrets, and no error if the reader left."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass

import click

from harness.cli.terminal.working import SPOKEN
from harness.errors import HarnessError
from harness.safe_text import harmless, redacted
from harness.tell.formats import folded


def echo(text: str, *, err: bool = False) -> None:
    """One text on standard output or standard error; sentences fold where a person reads them at a terminal.

    A pipe whose reader is gone (`harness run 2>&1 | head -1`) swallows what follows; the run goes on. Raises
    HarnessError if standard output cannot be written otherwise.
    """
    SPOKEN.set()
    try:
        shown = harmless(redacted(text))
        click.echo(folded(shown) if _at_terminal(err) and not shown.startswith("{") else shown, err=err)
    except OSError as error:
        _discard(err)
        if not err and not isinstance(error, BrokenPipeError):
            raise HarnessError(f"standard output cannot be written: {error.strerror}") from error


def begin(text: str) -> None:
    """A first word for a person who waits at a terminal; a log needs none."""
    if sys.stderr.isatty():
        echo(text, err=True)


def _at_terminal(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()


def _discard(err: bool) -> None:
    """Send what follows nowhere, also what Python flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (sys.stderr if err else sys.stdout).fileno())
        os.close(null)


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown besides results."""

    wide: bool = False
    """Whether tables have every column, whatever their width."""
    quiet: bool = False
    """Whether progress is left out: results, findings and errors stay."""
    verbose: bool = False
    """Whether every run shows its steps."""

    def say(self, text: str) -> None:
        """One line on standard error for the person who waits."""
        if not self.quiet:
            echo(text, err=True)

    def begin(self, text: str) -> None:
        """A first word, for a person at a terminal; a log needs none."""
        if not self.quiet:
            begin(text)
