"""`harness explain`: what a finding means and what to do."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

import click

from harness.backends.refusals import available
from harness.cli.options import completion
from harness.cli.options.shared import common, json_option
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.judge.findings.finders import kinds
from harness.tell.narrow import line_width


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
        raise HarnessError(f"finding '{finding}' is unknown. {available(finding, known)}")
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
