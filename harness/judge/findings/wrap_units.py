"""Whether weights are gathered block by block: by the adapter's list of units, and as measured."""

from __future__ import annotations

from harness.backends.base import Effective
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.fullest import most_gathered_bytes
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.states import all_kinds
from harness.record import MemoryPart, Record
from harness.record.workload import of_record

BLOCKS_AT_ONCE = 2
"""The block that computes, and one gathered ahead; `prefetch=N` of a backend comes on top."""


def find(runs: Runs) -> list[Finding]:
    """At most one finding per run: blocks that are not listed as units, else listed but not wrapped."""
    return [finding for row in runs.rows if (finding := _not_listed(row) or _not_there(row)) is not None]


def _not_listed(row: Row) -> Finding | None:
    layout, effective = row.record.layout, row.record.backend.effective
    if layout is None or effective is None or len(layout.blocks) < 2 or not _sharded(row.record):
        return None
    units = _units(effective)
    if len(units) >= len(layout.blocks):
        return None
    return _finding(
        row,
        f"wrap units: root and {len(units)} of {len(layout.blocks)} blocks; everything else is gathered with "
        "the root, without overlap",
    )


def _not_there(row: Row) -> Finding | None:
    """Every block is listed as a unit, and yet more was gathered at once than units could be."""
    layout, effective = row.record.layout, row.record.backend.effective
    if layout is None or effective is None:
        return None
    if not (_sharded(row.record) or set(layout.blocks) <= set(_units(effective))):
        return None
    limit = gathered_limit(row.record)
    if limit is None:
        return None
    seen = max((at_once(moment, limit) for moment in _forward(row.record)), default=0)
    if seen <= limit:
        return None
    return _finding(
        row,
        f"every block is listed as a unit, but a forward pass gathered {seen:,} bytes of weights at once, "
        f"more than the {limit:,} of root and largest blocks: blocks are not gathered one by one",
    )


def at_once(moment: MemoryPart, limit: int) -> int:
    """Bytes that this forward pass gathered at once.

    A strategy that gives gathered weights back after each unit is judged by the most that it held. One that
    keeps them for the backward pass holds all of them in the end; it is judged by the least, which it held
    at its first module.
    """
    kept = all_kinds(moment).get("gathered", 0) > limit
    return (moment.gathered_least_bytes if kept else moment.gathered_peak_bytes) or 0


def gathered_limit(record: Record) -> int | None:
    """Bytes of the root and the largest blocks; None if the record lacks them or nothing is sharded."""
    workload, effective = of_record(record), record.backend.effective
    if workload is None or effective is None or workload.shards < 2:
        return None
    width = DTYPE_BYTES.get(effective.gather_dtype or effective.parameter_dtype)
    if width is None:
        return None
    ahead = int(record.backend.options.get("prefetch") or 0)
    return most_gathered_bytes(workload, width, BLOCKS_AT_ONCE + ahead)


def _sharded(record: Record) -> bool:
    return (record.backend.shard_size or 1) > 1


def _units(effective: Effective) -> list[str]:
    """The root left out."""
    return [unit for unit in effective.wrap_units if unit]


def _forward(record: Record) -> list[MemoryPart]:
    return [m for part in record.ranks for m in part.memory if m.moment == "after_forward"]


def _finding(row: Row, message: str) -> Finding:
    record = row.record
    assert record.layout is not None
    assert record.backend.effective is not None
    moments = [m for part in record.ranks for m in part.memory]
    most = [m.gathered_peak_bytes for m in moments if m.gathered_peak_bytes is not None]
    least = [m.gathered_least_bytes for m in _forward(record) if m.gathered_least_bytes is not None]
    return Finding(
        id="one-wrap-unit",
        about=row.cell,
        text=message,
        values={
            "wrap_units": len(_units(record.backend.effective)),
            "blocks": len(record.layout.blocks),
            "gathered_peak_bytes": max(most, default=None),
            "gathered_least_bytes": max(least, default=None),
            "root_and_largest_blocks_bytes": gathered_limit(record),
        },
    )
