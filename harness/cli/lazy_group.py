"""A click group that imports a command's module when the command is called, and not to list it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem


class LazyGroup(click.Group):
    """Command NAME is the object NAME in the module NAME of `package`; `summaries` has a line for each."""

    def __init__(self, *arguments: Any, package: str, summaries: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._package = package
        # In place of the commands wherever only their names or lines are wanted.
        self.commands = {name: click.Command(name, help=summary) for name, summary in summaries.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is none of this name."""
        if cmd_name not in self.commands:
            return None
        command = getattr(import_module(f"{self._package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands with their lines; click would import each of them."""
        offered = [
            CompletionItem(name, help=self.commands[name].get_short_help_str())
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*offered, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their lines, shortened as click shortens them."""
        width = formatter.width - 6 - max(map(len, self.commands))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(width)) for name in self.list_commands(ctx)]
            )
