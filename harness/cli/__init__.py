"""The command line, the only place that prints. Results go to standard output, the rest to standard error."""

from __future__ import annotations

import contextlib
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from harness.cli.terminal.working import working
from harness.import_path import leave_current_folder


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
        give_example(command, cmd_name)
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


_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = _TABLE["summaries"]
"""Commands, each in the module of its name, with the first sentence of its help."""
EXAMPLES: dict[str, str] = _TABLE["examples"]
"""With which the help of each command begins."""


def give_example(command: click.Command, words: str) -> None:
    """Let the help of a command, or of those of a group, begin with its example."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            give_example(part, f"{words} {name}")
    if words not in EXAMPLES:
        return

    def format_help_text(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n  $ {EXAMPLES[words]}\n")
        click.Command.format_help_text(command, ctx, formatter)

    command.format_help_text = format_help_text  # type: ignore[method-assign]


SILENT = frozenset({"-q", "--quiet", "-h", "--help"})
"""Words with which no command says that it works."""


def is_silent(words: Sequence[str]) -> bool:
    """Whether a command with these words never says that it works; what follows `--` is another program's."""
    own = words[: words.index("--")] if "--" in words else words
    return not own or own[0] not in COMMANDS or not SILENT.isdisjoint(own)


def main() -> None:
    """Entry point of the `harness` command."""
    leave_current_folder()
    words = sys.argv[1:]
    # A terminated launcher must stop its ranks and write their record, as for Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with contextlib.nullcontext() if is_silent(words) else working(words[0]):
        harness(prog_name="harness")


@click.group(
    cls=LazyGroup,
    package=__name__,
    summaries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="sharding-harness")
def harness() -> None:
    """Run one fine-tuning job under every data-parallel sharding strategy and compare what happened."""


give_example(harness, "harness")
