"""What people ask in public, each in one command, and the first line of its answer as the pages have it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from tests.docs.markdown import ROOT

PAGES = {ROOT / "docs" / "planning.md": 11, ROOT / "README.md": 1}
"""With how many answers each has."""
ASKED = re.compile(r"harness (.+)\n# -> (.+)")
ANSWER = re.compile(
    r"(?:[\d,]+ ranks?[,:]|Use |nothing fits).+?(?= Runner-up: | No runner-up| With | Close to |$)"
)
"""The first of what is said, which the pages have."""
pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=125)]


def questions(page: Path) -> Iterator[re.Match[str]]:
    """Words after `harness`, answer."""
    return ASKED.finditer(page.read_text(encoding="utf-8"))


def answer(words: str) -> str:
    done = CliRunner().invoke(harness, shlex.split(words), prog_name="harness")
    assert done.exit_code == 0, done.output
    said = [" ".join(part.split("\n")) for part in done.stdout.split("\n\n")]
    return next((found[0] for part in said if (found := ANSWER.match(part))), said[0])


def test_each_question_has_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, update_golden: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the profiles that ship, whatever was traced here
    answers = {words: answer(words) for words in {match[1] for page in PAGES for match in questions(page)}}
    for page, count in PAGES.items():
        found = {match[0]: (match[2], answers[match[1]]) for match in questions(page)}
        assert len(found) == count
        if update_golden:
            text = page.read_text(encoding="utf-8")
            for asked, (old, new) in found.items():
                text = text.replace(asked, asked.removesuffix(old) + new)
            page.write_text(text, encoding="utf-8")
            continue
        assert {asked: old for asked, (old, _) in found.items()} == {
            asked: new for asked, (_, new) in found.items()
        }
