"""What `harness estimate` says first, as an engineer asks it, and that what follows says the same."""

import re

import pytest
from click.testing import CliRunner

from harness.cli.estimate import estimate

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]
LONG = ("data.sequence_length=32768", "training.activation_checkpointing=true")


def said(*words: str, settings: tuple[str, ...] = ()) -> list[str]:
    """The answer, and the paragraphs after it, each on one line."""
    given = [word for text in settings for word in ("--set", text)]
    done = CliRunner().invoke(estimate, [*words, *given])
    assert done.exit_code == 0, done.output
    return [" ".join(part.split()) for part in done.stdout.split("\n\n")]


@pytest.mark.parametrize(
    ("words", "settings", "without", "needed"),
    [
        (("--model", "llama-2-7b", "--gpu", "RTX-4090", "--world-size", "1"), ("adapter.kind=lora",),
         "activation checkpointing", "16.9 of 25.4 GB"),
        (("--model", "llama-2-13b", "--gpu", "A100-40"), (), "activation checkpointing", "33.9 of 42.4 GB"),
        (("--model", "llama-3.1-8b", "--gpu", "A100-40"), LONG, "a chunked loss", "35.2 of 42.4 GB"),
    ],
)  # fmt: skip
def test_the_first_line_has_what_changes_least_and_fits(
    words: tuple[str, ...], settings: tuple[str, ...], without: str, needed: str
) -> None:
    first, *rest = said(*words, settings=settings)
    assert f": nothing fits without {without}; with it " in first
    assert f": {needed}, about " in first
    (ways,) = (part for part in rest if part.startswith("What fits instead"))
    offer = first.partition("; with it ")[2]
    assert ways.startswith(f"What fits instead - {without}: {offer} harness estimate ")
    assert "does not fit" not in ways
    if "adapter.kind=lora" in settings:  # that trains adapters already
        assert not re.search(r"- LoRA\b", ways)
