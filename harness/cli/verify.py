"""`harness verify`: checks that everything in a report follows from its records."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.options.shared import PATH, common, json_option
from harness.cli.terminal.output import begin, echo
from harness.judge.wording import counted
from harness.record.store import without_collection
from harness.tell.verify import verify as verify_report


@click.command()
@click.argument("report", type=PATH)
@click.option(
    "--pictures-by-digest",
    is_flag=True,
    help="Accept pictures drawn by another renderer if the report lists their digest.",
)
@json_option
@common
def verify(report: Path, pictures_by_digest: bool, as_json: bool) -> int:
    """Recompute a report from its records and list every line that differs.

    Exits with 0 only if every table, sentence and picture follows from unchanged records.
    """
    begin(f"recomputing {report}")
    with without_collection():
        result = verify_report(report, pictures_by_digest=pictures_by_digest)
    if as_json:
        echo(json.dumps(result.as_json(), indent=1, ensure_ascii=False))
    for note in result.notes:
        echo(f"note: {note}", err=True)
    for problem in result.problems:
        echo(str(problem), err=as_json)
    if result.problems:
        count = len(result.problems)
        echo(f"{report}: {counted(count, 'problem')}", err=True)
        return 1
    echo(f"{report}: holds; {result.summary}", err=as_json)
    return 0
