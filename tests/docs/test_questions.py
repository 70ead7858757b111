"""What people ask in public, each in one command, and the first line of its answer as the page has it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "planning.md"
ASKED = re.compile(r"# (.+)\nharness (.+)\n# -> (.+)")
OF_ESTIMATE = re.compile(r"^[\d,]+ ranks?[,:]")
pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=125)]


def questions() -> Iterator[re.Match[str]]:
    """Question, words after `harness`, answer."""
    return ASKED.finditer(PAGE.read_text(encoding="utf-8"))


def answer(words: str) -> str:
    done = CliRunner().invoke(harness, shlex.split(words), prog_name="harness")
    assert done.exit_code == 0, done.output
    said = [" ".join(part.split("\n")) for part in done.stdout.split("\n\n")]
    of_estimate = (part for part in said if OF_ESTIMATE.match(part))
    return next(of_estimate, done.stdout.splitlines()[0])


def test_each_question_has_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, update_golden: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the profiles that ship, whatever was traced here
    found = {match[0]: (match[3], answer(match[2])) for match in questions()}
    assert len(found) == 11
    if update_golden:
        page = PAGE.read_text(encoding="utf-8")
        for text, (old, new) in found.items():
            page = page.replace(text, text.removesuffix(old) + new)
        PAGE.write_text(page, encoding="utf-8")
        return
    assert {text: old for text, (old, _) in found.items()} == {text: new for text, (_, new) in found.items()}
