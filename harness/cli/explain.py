"""`harness explain`: what a finding or a word of the tables means, and what to do about a finding."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Collection
from dataclasses import asdict
from functools import cache
from pathlib import Path

import click

from harness.backends.refusals import did_you_mean
from harness.cli.options import completion
from harness.cli.options.shared import common, json_option
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.judge.findings.finders import kinds
from harness.tell.formats import line_width

MOST = 5
"""Findings and words that a hint names."""
PAGE = Path(__file__).with_name("glossary.md")
"""`docs/glossary.md`, which every installation brings."""
ROW = re.compile(r"^\| (?P<words>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
ONLY_LINKS = re.compile(rf" \({LINK.pattern}(, {LINK.pattern})*\)")


@cache
def glossary() -> dict[str, str]:
    """Meanings by word, as the glossary's page has them, without its links."""
    rows = [*ROW.finditer(PAGE.read_text(encoding="utf-8"))][2:]  # heading and rule
    return {
        word.strip("` "): LINK.sub(r"\1", ONLY_LINKS.sub("", row["meaning"]))
        for row in rows
        for word in row["words"].split(",")
    }


def word_of(text: str) -> str | None:
    """The glossary's word that was meant, in any case, with hyphens or spaces."""
    return next((word for word in glossary() if _bare(word) == _bare(text)), None)


def _bare(word: str) -> str:
    return word.lower().replace("-", " ")


def unknown(word: str, findings: Collection[str]) -> str:
    """What to say of a word that nothing explains, with the findings and words that it may mean."""
    small = word.lower()
    known = [*findings, *glossary()]
    close = [one for one in known if small in one][:MOST] or difflib.get_close_matches(small, known, n=MOST)
    hint = f"{did_you_mean(close)} " if close else ""
    return f"'{word}' is unknown. {hint}`harness explain` lists all {len(findings)} findings"


@click.command()
@click.argument("word", required=False, shell_complete=completion.finding)
@json_option
@common
def explain(word: str | None, as_json: bool) -> int:
    """Explain a finding (cause, confirmation, fix) or a word of tables.

    WORD is the id that `compare` and reports show, or a word such as `band` or `payload`; without it all
    findings are listed.
    """
    known = kinds()
    if word is not None and word not in known:
        meant = word_of(word)
        if meant is None:
            raise HarnessError(unknown(word, known))
        meaning = glossary()[meant]
        if as_json:
            echo(json.dumps({"word": meant, "meaning": meaning}, indent=1))
        else:
            echo(textwrap.fill(f"{meant}: {meaning}.", line_width(), subsequent_indent="  "))
        return 0
    chosen = [*known.values()] if word is None else [known[word]]
    if as_json:
        echo(json.dumps({"findings": [asdict(kind) for kind in chosen]}, indent=1))
        return 0
    if word is None:
        width = max(map(len, known))
        for kind in chosen:
            echo(f"{kind.id:<{width}}  {kind.title}")
        return 0
    (kind,) = chosen
    echo(f"{kind.id}: {kind.title}.")
    for name in ("cause", "confirm", "reported", "fix"):
        if (said := getattr(kind, name)) is not None:
            text = f"{name.capitalize()}: {said}"
            echo(textwrap.fill(text, line_width(), initial_indent="  ", subsequent_indent="    "))
    return 0
