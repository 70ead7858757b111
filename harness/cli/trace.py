"""`harness trace`: reads traces of torch.profiler, shows where the time went, and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options.shared import PATH, common, json_option
from harness.cli.terminal.output import begin, echo
from harness.errors import HarnessError
from harness.nested import finite

if TYPE_CHECKING:
    from harness.tell.document import Document

FORMATS = (".md", ".html")


@click.command()
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--baseline", type=PATH, multiple=True, metavar="FILE",
    help="Trace of the same rank to compare with; repeat it for more ranks.",
)  # fmt: skip
@click.option(
    "--parameters", type=click.IntRange(1), help="Of the model: what the closed forms expect of it."
)
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", help="File to write, with pictures: FILE.md or FILE.html."
)
@json_option
@common
def trace(
    files: tuple[Path, ...],
    baseline: tuple[Path, ...],
    parameters: int | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Show where the time of traces went: computing, communicating, copying, idling.

    FILE is a trace of torch.profiler (export_chrome_trace), plain or gzip, of any program: one rank or
    several. Lists collectives with bytes and bus bandwidth, who waits for whom, and which strategy they
    look like.
    """
    from harness.tell.traces import terminal_lines, trace_document
    from harness.traces.analysis import read_traces
    from harness.traces.document import changes_of, document
    from harness.traces.skew import skew_of
    from harness.traces.strategy import likeness_of

    if output is not None and output.suffix not in FORMATS:
        raise HarnessError(f"--output was given '{output}'; end its name in {' or '.join(FORMATS)}")
    begin("reading traces")
    ranks = read_traces(files)
    before = read_traces(baseline) if baseline else []
    skew = skew_of(ranks)
    likeness = [likeness_of(rank, parameters) for rank in ranks]
    changes = changes_of(ranks, before) if before else None
    shown = trace_document(ranks, skew, likeness, changes)
    for line in terminal_lines(shown):
        echo(line, err=as_json)
    if as_json:
        echo(json.dumps(finite(document(ranks, skew, likeness, changes)), indent=1))
    if output is not None:
        _write(shown, output)
        echo(f"report: {output}", err=True)
    return 0


def _write(shown: Document, output: Path) -> None:
    """The document with its pictures next to it, or in it."""
    from harness.tell.report import write_document

    write_document(shown, output, "harness trace")
