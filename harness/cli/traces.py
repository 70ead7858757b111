"""`harness trace`: reads traces of torch.profiler, shows where the time went, and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options import PATH, common, json_option
from harness.cli.output import begin, echo
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
    from harness.traces.analysis import changes_of, document, likeness_of, read_traces, skew_of

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


@click.command()
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@json_option
@common
def snapshot(files: tuple[Path, ...], as_json: bool) -> int:
    """Show what was alive at the peak of a CUDA memory snapshot, and whose it was.

    FILE is what torch.cuda.memory._dump_snapshot wrote (a pickle, of which nothing is executed), or the
    same as JSON. Shows fragmentation and blocks held for other streams too.
    """
    from harness.errors import HarnessError
    from harness.snapshots.account import accounts, read_snapshot
    from harness.tell.traces import snapshot_document, terminal_lines

    begin("reading snapshots")
    found = []
    for file in files:
        of_file = accounts(read_snapshot(file))
        if not of_file:
            raise HarnessError(
                f"snapshot '{file}' has no memory of any device and no history: nothing to show"
            )
        found.append((str(file), of_file))
    for line in terminal_lines(snapshot_document(found)):
        echo(line, err=as_json)
    if as_json:
        devices = [{"file": name, **account.as_json()} for name, of_file in found for account in of_file]
        echo(json.dumps(finite({"devices": devices}), indent=1))
    return 0
