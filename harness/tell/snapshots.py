"""A document about memory snapshots: tables of what `harness.snapshots` found."""

from __future__ import annotations

from collections.abc import Sequence

from harness.snapshots.account import DeviceAccount
from harness.tell.document import Block, Column, Document, Items, Paragraph, Section, Table
from harness.tell.formats import megabytes, percent
from harness.tell.tables import prose

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
    groups = [[g.category, g.bytes, g.blocks, g.where] for g in account.groups]
    blocks: list[Block] = [
        Table(
            key=f"{key}_figures", rows=figures,
            columns=(
                Column("figure", "memory", align="left"), Column("peak_bytes", "peak MB", megabytes),
                Column("now_bytes", "at the end MB", megabytes),
            ),
        ),
        Table(
            key=f"{key}_categories", rows=categories,
            columns=(
                Column("category", "alive at the peak", align="left"), Column("bytes", "MB", megabytes),
                Column("share", "share", percent),
            ),
        ),
        Table(
            key=f"{key}_blocks", rows=groups,
            columns=(
                Column("category", "category", align="left"), Column("bytes", "MB", megabytes),
                Column("blocks", "blocks"), Column("where", "allocated by", align="left"),
            ),
        ),
        Paragraph(prose("snapshots")),
        Items(_remarks(account)),
    ]  # fmt: skip
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
