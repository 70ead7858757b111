"""How much a person wants to read: -q, -v and --wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from harness.cli.options import wide_option
from harness.cli.output import begin, echo


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


def view_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command -q, -v and --wide, and pass them as `view`."""

    @wide_option
    @click.option("-q", "--quiet", is_flag=True, help="Show results, findings and errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="Show steps of each run and which records are used.")
    @wraps(command)
    def with_view(wide: bool, quiet: bool, verbose: bool, **arguments: Any) -> int:
        if quiet and verbose:
            raise click.UsageError("-q and -v exclude each other")
        return command(view=View(wide=wide, quiet=quiet, verbose=verbose), **arguments)

    return with_view
