"""Every command of the documentation is one that exists, with arguments that it accepts."""

import re
from pathlib import Path

import click
import pytest

from harness.backends import registry
from harness.cli import harness
from harness.cli.options import split_backends
from harness.job.config import load_experiment
from tests.docs.commands import NOT_RUN, Command, commands
from tests.docs.markdown import ROOT, tokens

FOUND = list(commands())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
NOT_OURS = ("source", "pip", "python3", "/shared/harness/bin/pip")


@pytest.mark.parametrize("command", FOUND, ids=[f"{found.place} {found.text[:40]}" for found in FOUND])
def test_the_command_exists_and_accepts_its_arguments(command: Command) -> None:
    first, *rest = command.words
    given = command.of_harness()
    if given is not None:
        check(given)
    elif first == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif first == "python":
        name = f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0]
        assert (ROOT / name).is_file()
    else:
        assert first in NOT_OURS


def check(words: list[str]) -> None:
    """Parse the words as the command does, without running it. Raises click's or the harness's error."""
    command: click.Command = harness
    context = click.Context(harness)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    given = command.make_context(command.name, words, parent=context).params
    settings = [text for text in given.get("assignments", ()) if not text.startswith("model.name=")]
    load_experiment(None, [text for text in settings if "tokenizer" not in text])
    named = given.get("backends") or given.get("backend")
    for label in split_backends(named) if named else ():
        if not label.startswith("all-reduce"):
            registry.parse(label)
    config = given.get("config")
    assert config is None or config == Path("my-job.yaml") or (ROOT / config).is_file()


def test_a_wrong_option_or_setting_is_found() -> None:
    with pytest.raises(click.UsageError):
        check(["run", "--backend", "ddp", "--no-such-option"])
    with pytest.raises(Exception, match="unknown"):
        check(["run", "--backend", "ddp", "--set", "training.no_such_setting=1"])
    with pytest.raises(Exception, match="zero4"):
        check(["compare", "--backends", "zero4"])


def test_every_reason_for_not_running_holds_for_a_command() -> None:
    assert [start for start in NOT_RUN if not any(found.text.startswith(start) for found in FOUND)] == []


def test_the_code_on_the_page_of_own_models_is_that_of_its_example() -> None:
    example = (ROOT / "configs/own_model.py").read_text(encoding="utf-8")
    shown = [block.content for block in tokens(ROOT / "docs/your-model.md") if block.info == "python"]
    assert [part for code in shown for part in code.split("\n\n\n") if part not in example] == []
    assert "def model(" in "".join(shown)
