"""A document about memory snapshots: tables of what `harness.snapshots` found."""

from __future__ import annotations

from collections.abc import Sequence

from harness.snapshots.account import DeviceAccount
from harness.tell.document import Block, Document, Items, Paragraph, Section, Table
from harness.tell.formats import megabytes, percent
from harness.tell.tables import prose, row_of, table_columns

FIGURES, CATEGORIES = table_columns("snapshot_figures"), table_columns("snapshot_categories")
BLOCKS = table_columns("snapshot_blocks")

NO_HISTORY = "no history was recorded: the figures are of the moment of the snapshot (_record_memory_history)"
NO_STACKS = "no block has a stack: record with stacks='python' or 'all' to see whose they are"


def snapshot_document(files: Sequence[tuple[str, Sequence[DeviceAccount]]]) -> Document:
    """What was found in snapshots, for every format."""
    sections = [
        _section(f"snapshot{index}" if index else "snapshot", f"{name}, device {account.device}", account)
        for index, (name, account) in enumerate((n, a) for n, of in files for a in of)
    ]
    return Document("Memory snapshot", sections)


def _section(key: str, title: str, account: DeviceAccount) -> Section:
    figures = [
        ["allocated", account.peak_allocated_bytes, account.allocated_bytes],
        ["active", account.peak_active_bytes, account.active_bytes],
        ["reserved", account.peak_reserved_bytes, account.reserved_bytes],
        [
            "freed, held for other streams",
            account.most_held_for_streams_bytes,
            account.held_for_streams_bytes,
        ],
    ]
    peak = account.peak_allocated_bytes
    categories = [[name, size, size / peak if peak else None] for name, size in account.at_peak.items()]
    groups = [row_of(BLOCKS, group) for group in account.groups]
    blocks: list[Block] = [
        Table(key=f"{key}_figures", columns=FIGURES, rows=figures),
        Table(key=f"{key}_categories", columns=CATEGORIES, rows=categories),
        Table(key=f"{key}_blocks", columns=BLOCKS, rows=groups),
        Paragraph(prose("snapshots")),
        Items(_remarks(account)),
    ]
    return Section(key, title, blocks)


def _remarks(account: DeviceAccount) -> list[str]:
    found = [
        f"fragmentation: {megabytes(account.free_in_used_segments_bytes)} MB "
        f"({percent(account.fragmentation_share)} of what is reserved) lie free in {account.free_blocks:,} "
        "parts of segments that hold something; the largest free block has "
        f"{megabytes(account.largest_free_block_bytes)} MB"
    ]
    if account.reserved_at_peak_bytes:
        found.append(f"at the peak {megabytes(account.reserved_at_peak_bytes)} MB were reserved")
    if not account.has_history:
        found.append(NO_HISTORY)
    if account.groups and all(group.where == "n/a" for group in account.groups):
        found.append(NO_STACKS)
    found += [
        f"out of memory: {megabytes(request['bytes'])} MB were asked for, the device had "
        f"{megabytes(request['device_free_bytes'])} MB free"
        for request in account.out_of_memory
    ]
    return found
