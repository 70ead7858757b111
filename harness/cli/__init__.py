"""The command line, the only place that prints. Results go to standard output, the rest to standard error.

What is in this file needs no library but click, so that a command can say that it works before others load.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from harness.import_path import leave_current_folder
from harness.launch import STOPPING, open_standard_streams, speaks_for_ranks
from harness.version import __version__

_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, dict[str, str]] = _TABLE["groups"]
"""Commands with the first sentence of their help, as people think of them."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
EXAMPLES: dict[str, str] = _TABLE["examples"]
"""With which the help of each command begins."""
MODULES: dict[str, str] = _TABLE["modules"]
"""Of commands that are not in the module of their name."""
INSTEAD: dict[str, str] = _TABLE["instead"]
"""What to use in place of commands and options that were removed, of one command or of all."""
OPTIONS: dict[str, str] = _TABLE["options"]
"""Help of each option, of one command or of all."""
EXTRA_ARGUMENT, MISSING = "Got unexpected extra argument", ("Missing ", "No such command")
"""Of click."""
NUMBERS = (click.IntRange, click.FloatRange)
RANKS = frozenset(_TABLE["ranks"])
"""Names of the number of ranks, here and in other tools."""
BACKENDS = {"--backend", "--backends"}
OBSERVED = ("measure.warmup_steps", "measure.probed_steps", "measure.cooldown_steps")
"""All settings of an observed run."""


class Group(click.Group):
    """Says of an option or a command that there is not what to use instead."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        words = f"{_words(ctx)} {args[0]}".strip()
        if args[0] not in self.commands and not args[0].startswith("-"):
            others = [f"`harness {found}`" for found in _commands(harness) if found.endswith(f" {args[0]}")]
            if instead := INSTEAD.get(words, " or ".join(others)):
                ctx.fail(f"No such command '{args[0]}': use {instead}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while it is imported
            click.echo("interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            from harness.errors import shortened

            raise click.UsageError(shortened(_said(error)), error.ctx) from None


def _said(error: click.UsageError) -> str:
    """What click says of a wrong word, and what to use instead."""
    said = " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchOption):
        advice = _advice(error)
        return f"No such option '{error.option_name}'{f': {advice}' * bool(advice)}."
    if isinstance(error, click.BadParameter) and isinstance(
        kind := getattr(error.param, "type", None), NUMBERS
    ):
        allowed = _allowed(kind, getattr(error.param, "metavar", None) or "")
        return f"{said.rpartition(' is not ')[0]}; give {allowed}."
    words = _words(error.ctx) if error.ctx is not None else ""
    told = said.removesuffix(".")
    if (instead := INSTEAD.get(f"{words} WORD")) and told.startswith(EXTRA_ARGUMENT):
        return f"{told}: use {instead.replace('WORD', told.rpartition('(')[2].split()[0].rstrip(')'))}."
    wants = told.startswith((EXTRA_ARGUMENT, *MISSING)) and told.endswith(("'", ")"))
    if wants and words in EXAMPLES:
        return f"{told}: for example {EXAMPLES[words]}."
    return said


def _allowed(kind: click.IntRange | click.FloatRange, unit: str) -> str:
    """'a whole number, 1 or more', 'a number of minutes above 0', 'a number of days from 0 to 100'."""
    number = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    number += f" of {unit.lower()}" if unit.endswith("S") else ""
    if kind.max is not None:
        return f"{number} from {kind.min:g} to {kind.max:g}"
    return f"{number} above {kind.min:g}" if kind.min_open else f"{number}, {kind.min:g} or more"


def _words(context: click.Context) -> str:
    """'slurm submit' of `harness slurm submit`."""
    return context.command_path.partition(" ")[2]


def _advice(error: click.NoSuchOption) -> str:
    """What to use instead; empty if nothing is like it."""
    context, option = error.ctx, error.option_name.lower().replace("_", "-").replace("--use-", "--")
    assert context is not None
    own = {name for one in context.command.params for name in one.opts}
    if (instead := INSTEAD.get(f"{_words(context)} {option}", INSTEAD.get(option))) is not None:
        return f"use {instead}"
    if option in RANKS and (ranks := own.intersection(RANKS)):
        return f"the number of ranks is {' or '.join(sorted(ranks))}"
    near = [n for n in own if n.startswith("--") and (n.startswith(option) or option == f"{n}s")]
    if near:
        return f"use {' or '.join(sorted(near))}"
    if "--set" in own:
        from harness.job.config import settings_by_name

        word, known = option.removeprefix("--").replace("-", "_").lower(), settings_by_name()
        begun = [name for name in known if name.startswith(f"{word}_")]
        meant = known.get(word, known[begun[0]] if len(begun) == 1 else ())
        meant = tuple(one for one in meant if not one.startswith("--"))
        observes, compares = _words(context) == "observe", _words(context) in ("compare", "slurm render")
        taken = [one for one in meant if compares or not one.startswith("compare.") or "price" in one]
        taken = [one for one in taken if not observes or one in OBSERVED]
        if observes and not taken and (meant or option in RANKS):
            return f"the command after `--` decides{' (torchrun --nproc-per-node N)' * (option in RANKS)}"
        if any(one.startswith("compare.backends") for one in meant):
            return f"use {' or '.join(sorted(own & BACKENDS))}: `harness backends` lists names and options"
        if taken:
            return f"use --set {' or --set '.join(one if '=' in one else f'{one}=VALUE' for one in taken)}"
    if (word := option.removeprefix("--")) in COMMANDS:
        return f"`harness {word}` is a command"
    # Without the dashes, in which all are alike.
    if like := difflib.get_close_matches(word, [name.lstrip("-") for name in own], n=1, cutoff=0.65):
        return f"perhaps --{like[0]}"
    others = [
        words
        for words, command in _commands(harness).items()
        if any(option in o.opts for o in command.params)
    ]
    group = _words(context).rpartition(" ")[0]
    near = [words for words in others if group and words.startswith(f"{group} ")] or others
    return f"it is an option of {', '.join(near)}" if near else ""


def _commands(group: click.Group, before: str = "") -> dict[str, click.Command]:
    """The commands by their words, those of groups too."""
    found: dict[str, click.Command] = {}
    for name in group.commands:
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            found |= _commands(command, f"{name} ")
        elif command is not None:
            found[f"{before}{name}"] = command
    return found


class CommandLine(Group):
    """Imports a command when it is needed."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # In place of the commands wherever only their names or lines are wanted.
        self.commands = {name: click.Command(name, help=summary) for name, summary in COMMANDS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        place, _, name = MODULES.get(cmd_name, cmd_name).partition(":")
        command = getattr(import_module(f"{__name__}.{place}"), name or cmd_name)
        assert isinstance(command, click.Command)
        give_help(command, cmd_name)
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
        """Write the commands with their lines, group by group."""
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, line in group.items()])


def give_help(command: click.Command, words: str) -> None:
    """Give the options of a command, or of those of a group, their help, which begins with an example."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            give_help(part, f"{words} {name}")
    for one in command.params:
        if isinstance(one, click.Option) and one.help is None:
            found = (OPTIONS.get(f"{words} {name}", OPTIONS.get(name)) for name in one.opts)
            one.help = next(filter(None, found), None)
    if words not in EXAMPLES:
        return

    def format_help_text(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n  $ {EXAMPLES[words]}\n")
        click.Command.format_help_text(command, ctx, formatter)

    command.format_help_text = format_help_text  # type: ignore[method-assign]


WORKING_AFTER = "HARNESS_WORKING_AFTER"
"""Environment variable: seconds without a word until a command says that it works; 0: it never does."""
SPOKEN = threading.Event()
"""Whether the command has printed something."""
SILENT = frozenset({"-q", "--quiet", "-h", "--help"})
"""Words with which no command says that it works."""


def is_silent(words: Sequence[str]) -> bool:
    """Whether a command with these words never says that it works; what follows `--` is another program's."""
    own = words[: words.index("--")] if "--" in words else words
    return not own or own[0] not in COMMANDS or not SILENT.isdisjoint(own)


def says_that_it_works() -> bool:
    """Whether a command that is silent says so."""
    return _working_after() > 0 and speaks_for_ranks()


def _working_after() -> float:
    return float(os.environ.get(WORKING_AFTER, "1"))


@contextlib.contextmanager
def working(command: str) -> Iterator[None]:
    """Say on standard error that a command works, if it prints nothing for a second."""
    after, ended = _working_after(), threading.Event()

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


def remove_empty_cache() -> None:
    """Remove torch's folder of compiled code if empty: an import makes it, and its use makes it again."""
    import getpass
    import tempfile

    with contextlib.suppress(OSError, KeyError):
        os.rmdir(f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")


def main() -> None:
    """Entry point of the `harness` command."""
    atexit.register(remove_empty_cache)
    open_standard_streams()
    leave_current_folder()
    words = [word for word in sys.argv[1:] if word != "--debug"]
    # A terminated launcher must stop its ranks and write their record, as for Ctrl-C.
    for number in STOPPING[1:]:
        signal.signal(number, signal.default_int_handler)
    with contextlib.nullcontext() if is_silent(words) else working(words[0]):
        try:
            harness(prog_name="harness")
        except OSError as error:  # of what click itself prints: help and version
            from harness.cli.output import lead_nowhere

            lead_nowhere(sys.stdout)
            sys.exit(f"harness: standard output cannot be written: {error.strerror}")


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error: harness --debug COMMAND.")
def harness(debug: bool) -> None:
    """Run one training job under DDP, ZeRO and FSDP, and compare memory, traffic, speed and loss."""


give_help(harness, "harness")
