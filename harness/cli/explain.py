"""`harness explain`: what a finding means and what to do."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

import click

from harness.backends.refusals import did_you_mean
from harness.cli.options import completion
from harness.cli.options.shared import common, json_option
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.judge.findings.finders import kinds
from harness.tell.narrow import line_width

MOST = 5
"""Findings that a hint names."""
VERDICTS = ("exact", "tight", "band", "diverged", "unjudged", "not comparable")
"""Words of tables that are no findings."""


def unknown(word: str, known: Sequence[str]) -> str:
    """Where a word that is no finding is explained, or the findings that it may mean."""
    small = word.lower()
    if small.replace("-", " ") in VERDICTS:
        return f"'{word}' is a verdict, not a finding: docs/glossary.md says what it means"
    close = [one for one in known if small in one][:MOST] or difflib.get_close_matches(small, known, n=MOST)
    hint = f"{did_you_mean(close)} " if close else ""
    return f"finding '{word}' is unknown. {hint}`harness explain` lists all {len(known)}"


@click.command()
@click.argument("finding", required=False, shell_complete=completion.finding)
@json_option
@common
def explain(finding: str | None, as_json: bool) -> int:
    """Explain a finding: its cause, how to confirm it and the fix.

    FINDING is the id that `compare` and reports show; without it all are listed.
    """
    known = kinds()
    if finding is not None and finding not in known:
        raise HarnessError(unknown(finding, [*known]))
    chosen = [*known.values()] if finding is None else [known[finding]]
    if as_json:
        echo(json.dumps({"findings": [asdict(kind) for kind in chosen]}, indent=1))
        return 0
    if finding is None:
        width = max(map(len, known))
        for kind in chosen:
            echo(f"{kind.id:<{width}}  {kind.title}")
        return 0
    (kind,) = chosen
    echo(f"{kind.id}: {kind.title}.")
    for name in ("cause", "confirm", "fix"):
        text = f"{name.capitalize()}: {getattr(kind, name)}"
        echo(textwrap.fill(text, line_width(), initial_indent="  ", subsequent_indent="    "))
    return 0
