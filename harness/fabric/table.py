"""The table of a self-test, as nccl-tests lays it out."""

from __future__ import annotations

from tabulate import tabulate

from harness.fabric.result import FabricResult, FabricRow
from harness.judge.wording import counted
from harness.tell.formats import NOT_AVAILABLE, gigabytes, number

HEADERS = ("operation", "ranks", "bytes", "repeats", "time us (best..worst)", "algbw GB/s", "busbw GB/s")


def fabric_table(result: FabricResult, style: str = "simple") -> str:
    """One line per operation, group and size; GB is 1e9 bytes."""
    body = [
        [
            row.op,
            f"{row.ranks[0]}-{row.ranks[1]}" if row.op == "point_to_point" else f"all {len(row.ranks)}",
            f"{row.size_bytes:,}",
            str(row.repeats * len(row.seconds)),
            _times(row),
            gigabytes(row.algorithm_bandwidth),
            gigabytes(row.bus_bandwidth),
        ]
        for row in result.rows
    ]
    nodes, device = len(set(result.hosts)), result.device_name
    head = (
        f"{result.transport} on {result.world_size} ranks{f' ({device})' if device else ''}, "
        f"{counted(nodes, 'node')}, "
        f"interface {result.interface or 'not chosen'}"
    )
    table = tabulate(
        body, headers=HEADERS, tablefmt=style, disable_numparse=True, colalign=("left", *["right"] * 6)
    )
    return f"{head}\n{table}"


def _times(row: FabricRow) -> str:
    if not row.seconds:
        return NOT_AVAILABLE
    return f"{number(min(row.seconds) * 1e6)} ({number(max(row.seconds) * 1e6)})"
