"""A click group that imports a command's module when the command is called, and not to list it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Command NAME is the object NAME in the module NAME of `package`; `summaries` has a line for each."""

    def __init__(self, *arguments: Any, package: str, summaries: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._package = package
        self._summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the help text."""
        return sorted(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is none of this name."""
        if cmd_name not in self._summaries:
            return None
        command = getattr(import_module(f"{self._package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their lines, shortened as click shortens them."""
        width = formatter.width - 6 - max(map(len, self._summaries))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _shortened(self._summaries[name], width)) for name in self.list_commands(ctx)]
            )


def _shortened(summary: str, width: int) -> str:
    return click.Command(None, help=summary).get_short_help_str(width)
