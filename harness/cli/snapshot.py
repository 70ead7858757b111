"""`harness snapshot`: reads memory snapshots of CUDA, and shows what was alive at the peak."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.options.shared import PATH, common, json_option
from harness.cli.terminal.output import begin, echo
from harness.nested import finite


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
