"""The command line reference, from the click commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from docs.hooks.tables import code, table
from harness.cli import EXAMPLES, harness

TITLE = "Command line"
HEAD = """\
# Command line

Generated from the commands; `harness COMMAND --help` shows the same. Exit codes: 0 done, 1 an error in one
line, 2 usage, 3 if `--strict`, `--fail-on` or `--require-busbw` refuses the result, 130 interrupted.
"""


def commands(group: click.Group = harness, path: str = "harness") -> Iterator[tuple[str, click.Command]]:
    """Every command that help lists, with its words, groups left out."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        words = f"{path} {name}"
        if isinstance(command, click.Group):
            yield from commands(command, words)
        else:
            yield words, command


def commands_page() -> str:
    """The page in Markdown: usage, help, arguments and options of each command."""
    return "\n".join([HEAD, *(_command(words, command) for words, command in commands())])


def _command(words: str, command: click.Command) -> str:
    context = click.Context(command)
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    rows = [_option(option, context) for option in options if not option.hidden]
    example = EXAMPLES.get(words.removeprefix("harness "), "")
    parts = [
        f"## {words}",
        cleandoc(command.help or ""),
        "\n".join(["```", usage, *filter(None, [example]), "```"]),
    ]
    if rows:
        parts.append(table(["option", "value", "default", "meaning"], rows))
    return "\n\n".join(parts) + "\n"


def _option(option: click.Option, context: click.Context) -> list[str]:
    names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else _value(option, context)
    meaning = option.help or ""
    notes = ["required"] if option.required else []
    notes += ["repeatable"] if option.multiple and option.callback is None else []
    notes = [note for note in notes if note not in meaning]
    meaning += f" ({', '.join(notes)})" if notes else ""
    return [names, value, _default(option), meaning]


def _value(option: click.Option, context: click.Context) -> str:
    kind = option.type
    if isinstance(kind, click.Choice):
        return " ".join(code(str(choice)) for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        ends = [f"{sign} {end}" for sign, end in (("≥", kind.min), ("≤", kind.max)) if end is not None]
        return f"{kind.name.split()[0]} ({', '.join(ends)})"
    return code(option.make_metavar(context))


def _default(option: click.Option) -> str:
    if option.is_flag or option.default is None or not option.show_default:
        return ""
    return code(str(option.default))
