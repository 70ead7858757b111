"""The table of a self-test, as nccl-tests lays it out."""

from __future__ import annotations

from tabulate import tabulate

from harness.compare.wording import counted
from harness.fabric.result import FabricResult
from harness.report.formats import number

HEADERS = ("operation", "ranks", "bytes", "repeats", "time us (best..worst)", "algbw GB/s", "busbw GB/s")


def fabric_table(result: FabricResult, style: str = "simple") -> str:
    """One line per operation, group and size; GB is 1e9 bytes."""
    body = [
        [
            row.op,
            f"{row.ranks[0]}-{row.ranks[1]}" if row.op == "point_to_point" else f"all {len(row.ranks)}",
            f"{row.size_bytes:,}",
            str(row.repeats * len(row.seconds)),
            f"{number(min(row.seconds) * 1e6)} ({number(max(row.seconds) * 1e6)})",
            number(row.algorithm_bandwidth / 1e9),
            number(row.bus_bandwidth / 1e9),
        ]
        for row in result.rows
    ]
    nodes = len(set(result.hosts))
    head = (
        f"{result.transport} on {result.world_size} ranks, {counted(nodes, 'node')}, "
        f"interface {result.interface or 'not chosen'}"
    )
    table = tabulate(
        body, headers=HEADERS, tablefmt=style, disable_numparse=True, colalign=("left", *["right"] * 6)
    )
    return f"{head}\n{table}"
