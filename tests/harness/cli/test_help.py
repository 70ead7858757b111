"""Help: what it loads, and that every command is listed with the first sentence of its own help."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from harness.cli import COMMANDS, EXAMPLES, INSTEAD, harness

HEAVY = {"numpy", "pydantic", "psutil", "tabulate", "torch", "tqdm", "transformers", "yaml"}
HELP = """
import sys, harness.cli
try:
    harness.cli.harness(["--help"])
except SystemExit:
    print("loaded:", *sys.modules)
"""
MOST_MODULES_OF_THE_HARNESS = 6
"""The package, its import path, its command line, what says that it works, what launchers tell."""


def test_help_loads_no_command_and_no_library_but_click() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("loaded: ")
    assert all(f"\n  {name} " in text for name in COMMANDS)
    loaded = modules.split()
    assert not HEAVY & set(loaded)
    assert len([name for name in loaded if name.split(".")[0] == "harness"]) <= MOST_MODULES_OF_THE_HARNESS


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_listed_with_the_first_sentence_of_its_help(name: str) -> None:
    command = harness.get_command(click.Context(harness), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=200) == COMMANDS[name]


def test_a_mistyped_command_is_corrected() -> None:
    done = CliRunner().invoke(harness, ["rnu"])
    assert done.exit_code == 2
    assert "Did you mean 'run'?" in done.stderr


@pytest.mark.parametrize("gone", INSTEAD)
def test_what_is_gone_has_one_line_that_says_what_to_use(gone: str) -> None:
    words = ["compare", gone] if gone.startswith("--") else gone.split()
    words = ["slurm", "submit", "--poll-seconds"] if gone == "--poll-seconds" else words
    done = CliRunner().invoke(harness, words, prog_name="harness")
    assert done.exit_code == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    assert line.endswith(f": use {INSTEAD[gone]}.")


def test_an_option_of_another_command_is_named() -> None:
    for words, said in {
        "run --gpus 2": "the number of ranks is --nproc",
        "compare --bundle x": "it is one of doctor",
        "fabric --world-size 2": "the number of ranks is --nproc",
    }.items():
        assert said in CliRunner().invoke(harness, words.split(), prog_name="harness").stderr


def every_command(group: click.Group = harness, words: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield f"{words}{name}", command
            yield from every_command(command, f"{words}{name} ")
        elif not command.hidden:
            yield f"{words}{name}", command


MEANINGS = {
    "--model": "Name or hub id of the catalogue, folder with config.json, or its file",
    "--backends": "Comma-separated names with their options",
    "--nproc": "Ranks on (this machine|each node)",
    "--set": "Override a setting",
    "--runs": "Folder of the records",
    "--output": "(New f|F)(older|ile)( for| of| to)",
    "--json": "Print one JSON document on standard output",
    "--config": "YAML file, or @NAME",
}
"""With which the help of an option begins wherever it is."""


def test_an_option_means_the_same_in_every_command() -> None:
    shorts = {"-o": "--output", "-q": "--quiet", "-v": "--verbose"}
    for words, command in every_command():
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, (words, option.name)
                for name in MEANINGS.keys() & set(option.opts):
                    assert re.match(MEANINGS[name], option.help or ""), (words, name, option.help)
                for short, long in shorts.items():
                    assert (short in option.opts) == (long in option.opts), (words, option.opts)


def test_plans_take_their_number_of_ranks_by_either_name() -> None:
    named = {
        words: {"--world-size", "--gpus"}.intersection(*[option.opts for option in options])
        for words, command in every_command()
        if (options := [one for one in command.params if {"--world-size", "--gpus"} & {*one.opts}])
    }
    both = {"--world-size", "--gpus"}
    assert named == {"estimate": both, "recommend": both, "simulate": both}


def test_the_help_of_every_command_begins_with_an_example_that_it_takes() -> None:
    for words, command in every_command():
        shown = CliRunner().invoke(harness, [*words.split(), "--help"]).stdout
        example = EXAMPLES[words]
        assert shown.splitlines()[2] == f"  $ {example}", words
        given = shlex.split(example)[1 + len(words.split()) :]
        command.make_context(words, given)  # raises where an option is unknown or a required one missing
    assert len(EXAMPLES) == 1 + sum(1 for _ in every_command())
    shown = CliRunner().invoke(harness, ["--help"]).stdout
    assert shown.splitlines()[2] == f"  $ {EXAMPLES['harness']}"
