"""`harness fabric`: measures the network, shows the result and judges it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.backends.refusals import available
from harness.cli.options import EXIT_GATE, PATH, common, default_ranks, json_option, resolve_device
from harness.cli.output import echo
from harness.errors import HarnessError
from harness.fabric.result import (
    OPERATIONS,
    FabricResult,
    fabric_table,
    judged_batch,
    parse_rate,
    parse_size,
    result_file,
    shortfall,
    start_ranks,
    whole_elements,
    write_result,
)
from harness.files import refusing
from harness.launch import external_rank, started_as_rank
from harness.rank.process.start import leave
from harness.record.store import try_writing

DEFAULT_LARGEST = {"cuda": "4GB", "cpu": "64MB"}
"""gloo moves about 1 GB/s: larger tensors tell no more and take minutes."""


@click.command()
@click.option("--nproc", type=click.IntRange(2))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--max-size")
@click.option("--operations")
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True)
@click.option("--require-busbw", metavar="RATE")
@click.option("-o", "--output", type=PATH)
@json_option
@common
def fabric(
    nproc: int | None,
    device: str,
    max_size: str | None,
    operations: str | None,
    repeats: int,
    require_busbw: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure the network that collectives use, and check its bus bandwidth.

    Starts ranks on this machine, or becomes one of them under torchrun.
    """
    is_rank = started_as_rank()
    device = device if is_rank and device != "auto" else resolve_device(device, "--device cpu")
    wanted = split_operations(operations)
    largest = parse_size(max_size or DEFAULT_LARGEST[device])
    required = parse_rate(require_busbw) if require_busbw else None
    shows = not is_rank or external_rank() == 0
    if shows:
        check_output(output)
    if is_rank:
        from harness.fabric.measurement import measure  # loads torch

        result = measure(device, largest, wanted, repeats=repeats)
    else:
        # Not sys.argv: torchrun takes --nproc for an abbreviation of its own, wherever it stands.
        arguments = [
            "--device", device, "--max-size", str(largest), "--operations", ",".join(wanted), "--repeats",
            str(repeats),
        ]  # fmt: skip
        result = start_ranks(nproc or default_ranks(device), arguments)
    if shows and output is not None:
        write_result(result, output)
    code = present(result, largest, required, as_json) if shows else 0
    if is_rank:
        leave(code)
    return code


def split_operations(text: str | None) -> list[str]:
    """Operations of a comma-separated list; all without one. Raises HarnessError for an unknown one."""
    if text is None:
        return list(OPERATIONS)
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OPERATIONS:
            raise HarnessError(f"operation '{name}' is unknown. {available(name, OPERATIONS)}")
    return names or list(OPERATIONS)


def check_output(output: Path | None) -> None:
    """Raise HarnessError for a file that could not be written after minutes of measuring."""
    if output is not None:
        path = result_file(output)
        with refusing(f"--output was given '{path}', which cannot be written"):
            try_writing(path)


def present(result: FabricResult, asked_bytes: int, required: float | None, as_json: bool) -> int:
    """Show a result and whether memory limited its sizes; return 3 if it misses the required bytes/s."""
    echo(fabric_table(result), err=as_json)
    largest = max(row.size_bytes for row in result.rows)
    if largest < 4 * whole_elements(asked_bytes, result.world_size):
        echo(f"not enough memory for {asked_bytes:,} bytes: measured up to {largest:,}", err=True)
    if as_json:
        rows = [
            row.model_dump()
            | {
                "algorithm_bytes_per_second": row.algorithm_bandwidth,
                "bus_bytes_per_second": row.bus_bandwidth,
            }
            for row in result.rows
        ]
        document = result.model_dump() | {"rows": rows, "summary": result.summary().model_dump()}
        echo(json.dumps(document, indent=1))
    missed = shortfall(result, required) if required is not None else None
    if missed is not None:
        echo(f"harness: {missed}", err=True)
        return EXIT_GATE
    if required is not None:
        echo(f"bus bandwidth meets --require-busbw ({judged_batch(result)})", err=True)
    return 0
