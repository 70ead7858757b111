"""Documents about what torch dumps: memory snapshots, and flight recorders of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from harness.nested import grouped
from harness.snapshots.account import DeviceAccount
from harness.snapshots.flight_recorder import Hang, named
from harness.tell.document import Block, Document, Items, Paragraph, Picture, Section, Table
from harness.tell.formats import megabytes, percent
from harness.tell.pictures.drawing import ALLOCATED, Row, layer
from harness.tell.pictures.plots import BAR_WIDTH
from harness.tell.tables import blocks_of, prose, row_of, table_columns

FIGURES, CATEGORIES = table_columns("snapshot_figures"), table_columns("snapshot_categories")
BLOCKS = table_columns("snapshot_blocks")

MOST_SHARES = 3
"""Of a peak's categories in the first line."""
NO_HISTORY = "no history was recorded: the figures are of the moment of the snapshot (_record_memory_history)"
NO_STACKS = "no block has a stack: record with stacks='python' or 'all' to see whose they are"


def snapshot_document(files: Sequence[tuple[str, Sequence[DeviceAccount]]]) -> Document:
    """What was found in snapshots, for every format."""
    sections = [
        _section(f"snapshot{index}" if index else "snapshot", f"{name}, device {account.device}", account)
        for index, (name, account) in enumerate((n, a) for n, of in files for a in of)
    ]
    return Document(_answer([account for _, of in files for account in of]), sections)


def _answer(accounts: Sequence[DeviceAccount]) -> str:
    """'Peak 55,080 MB allocated: optimizer 50 %, gradients 25 %', of the device that ran out of memory or had
    most."""
    if not accounts:
        return "No device holds memory"
    most = max(accounts, key=lambda account: (bool(account.out_of_memory), account.peak_allocated_bytes))
    peak = most.peak_allocated_bytes
    said = f"{'Peak' if most.has_history else 'At the snapshot'} {megabytes(peak)} MB allocated"
    if most.out_of_memory:
        said = (
            f"Out of memory for {megabytes(most.out_of_memory[0]['bytes'])} MB; {said[0].lower()}{said[1:]}"
        )
    if len(accounts) > 1:
        said += f" on device {most.device} of {len(accounts)}"
    by_size = sorted(most.at_peak.items(), key=lambda one: -one[1])[:MOST_SHARES] if peak else []
    shares = ", ".join(f"{name} {percent(size / peak)}" for name, size in by_size)
    return f"{said}: {shares}" if shares else said


def _section(key: str, title: str, account: DeviceAccount) -> Section:
    held = "held_for_streams_bytes"
    figures = [
        *(
            [name, getattr(account, f"peak_{name}_bytes"), getattr(account, f"{name}_bytes")]
            for name in ("allocated", "active", "reserved")
        ),
        ["freed, held for other streams", getattr(account, f"most_{held}"), getattr(account, held)],
    ]
    peak = account.peak_allocated_bytes
    categories = [[name, size, size / peak if peak else None] for name, size in account.at_peak.items()]
    blocks: list[Block] = [
        Table(key=f"{key}_figures", columns=FIGURES, rows=figures),
        Table(key=f"{key}_categories", columns=CATEGORIES, rows=categories),
        Table(key=f"{key}_blocks", columns=BLOCKS, rows=[row_of(BLOCKS, group) for group in account.groups]),
        Paragraph(prose("snapshots")),
        Items(_remarks(account)),
        *filter(None, [_over_time(f"{key}_over_time", account)]),
    ]
    return Section(key, title, blocks)


def _over_time(key: str, account: DeviceAccount) -> Picture | None:
    """What is allocated from the beginning of the history to its end, by category."""
    moments = account.over_time
    names = [name for name in ALLOCATED if any(name in moment["bytes"] for moment in moments)]
    if not names:
        return None
    is_timed = moments[0]["seconds"] is not None
    peak = f"peak {megabytes(account.peak_allocated_bytes)} MB"
    rows: list[Row] = [
        {
            "moment": moment["seconds" if is_timed else "event"],
            "category": name, "order": names.index(name), "megabytes": moment["bytes"].get(name, 0) / 1e6,
            "peak": peak if moment["is_peak"] and name == names[0] else None,
        }
        for moment in moments
        for name in names
    ]  # fmt: skip
    at = next(moment["event"] for moment in moments if moment["is_peak"])
    align = "right" if 2 * at > moments[-1]["event"] else "left"
    title = "s since the recording began" if is_timed else "events of the allocator"
    return Picture(
        key=key,
        caption="Allocated memory by category; dashed: the peak.",
        alt=f"Areas of allocated memory over time, by category: {peak}.",
        chart=lambda: layer(
            "over_time", rows=rows, width=BAR_WIDTH, title=title, names=names, align=align,
            colours=[ALLOCATED[name] for name in names],
        ),
    )  # fmt: skip


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


WAITS, MOST_STACKS = table_columns("hang_ranks"), 8


def hang_document(hang: Hang) -> Document:
    """Where each rank waits; the verdict is the title."""
    rows = []
    for wait in hang.waits:
        entry = wait.entry or wait.last
        after = "" if wait.entry else "none, after "
        values = row_of(WAITS[2:-2], entry) if entry else [None] * len(WAITS[2:-2])
        rows.append(
            [
                wait.rank,
                entry and f"{after}{entry.operation}",
                *values,
                named(wait.for_ranks) or None,
                entry and entry.where,
            ]
        )
    seen = ((wait.entry or wait.last, wait.rank) for wait in hang.waits)
    stacks = grouped((" <- ".join(entry.stack), rank) for entry, rank in seen if entry and entry.stack)
    blocks = blocks_of(
        Table(key="hang_ranks", columns=WAITS, rows=rows),
        Items(list(hang.remarks)) if hang.remarks else None,
        prose("hang"),
        Items([(f"stack of rank {named(of)}", stack) for stack, of in stacks.items()][:MOST_STACKS]),
    )
    return Document(hang.verdict, [Section("hang", "Ranks", blocks)])
