"""Measured, expected and textbook communication, and what explains the differences."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.metrics import SENT, metrics_in
from harness.judge.repeats import Repeats
from harness.judge.rows import Row
from harness.judge.volume import textbook_differences, volume_differences, volume_of, why_unknown
from harness.report.document import Block, Column, Paragraph, Section, Table, plain
from harness.report.tables import LABELS


def exact(value: float | None) -> str:
    """Bytes with thousands separated; a fraction, which rings of some sizes give, to one place."""
    if value is None:
        return plain(None)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def signed(value: float | None) -> str:
    """The same with its sign."""
    if value is None:
        return plain(None)
    return ("+" if value > 0 else "") + exact(value)


VOLUME = metrics_in("volume")
COLUMNS = (
    *LABELS,
    *(Column(metric.key, "measured" if metric.key == SENT else metric.title, exact) for metric in VOLUME),
    Column("payload", "payload as expected", align="left"),
)
TERMS = (
    *LABELS,
    Column("term", "term", align="left"),
    Column("expected_bytes", "expected", exact),
    Column("textbook_bytes", "textbook", exact),
    Column("difference_bytes", "difference", signed),
    Column("remark", "why", align="left"),
)
DIFFERENCES = (
    *LABELS,
    Column("phase", "phase", align="left"),
    Column("op", "collective", align="left"),
    Column("dtype", "dtype", align="left"),
    Column("role", "group", align="left"),
    Column("measured_bytes", "measured", exact),
    Column("expected_bytes", "expected", exact),
    Column("difference_bytes", "difference", signed),
)

SHARING = (
    "Where ranks share samples, figures are means over the ranks, since stages of a pipeline differ, and the "
    "textbook has none: the papers count strategies whose ranks have samples of their own."
)


def volume_section(comparison: Comparison) -> Section | None:
    """The volumes of each backend, and two tables that explain how they differ; None without figures."""
    firsts = [row for group in comparison.groups if group.record.comm for row in _distinct(group)]
    if not firsts:
        return None
    blocks: list[Block] = [
        Paragraph(
            "Bytes that a rank sends per step with the ring algorithm. measured: the payload of every "
            "collective is counted when it is called, and its bytes on a ring follow by formula, which makes "
            "transports comparable. expected: the closed form of this implementation, from the job alone. "
            "textbook: the closed form of the strategy. on the transport: what the transport of this run "
            "sends for the same calls, also by formula, if it implements a collective as another; the "
            "project's tests check these formulae against bytes on a wire. A repeat that sent other bytes "
            "than the first has its own line."
        ),
        *([Paragraph(SHARING)] if any(row.record.world.dimensions for row in firsts) else []),
        Table(key="communication_volume", columns=COLUMNS, rows=[_line(row) for row in firsts]),
    ]
    terms = [line for row in firsts for line in _terms(row)]
    if terms:
        blocks.append(
            Table(
                key="communication_terms",
                columns=TERMS,
                rows=terms,
                caption="Expected minus textbook, term by term, in bytes sent per step",
            )
        )
    differences = [line for row in firsts for line in _differences(row)]
    if differences:
        blocks.append(
            Table(
                key="communication_differences",
                columns=DIFFERENCES,
                rows=differences,
                caption="Measured payload that is not as expected, in bytes over the probed steps (setup, "
                "evaluation and digest: over the run)",
            )
        )
    return Section("communication_volume", "Communication: measured, expected, textbook", blocks)


def _distinct(group: Repeats) -> list[Row]:
    """The first repeat that was counted, and those that sent other bytes."""
    found: dict[float, Row] = {}
    for row in group.rows:
        sent = row.figures[SENT]
        if sent is not None:
            found.setdefault(sent, row)
    return list(found.values()) or [group.rows[0]]


def _line(row: Row) -> list[object]:
    values = row.figures
    return [*row.cell, *(values[metric.key] for metric in VOLUME), _verdict(row)]


def _verdict(row: Row) -> str:
    differences, reason = volume_differences(row.record), why_unknown(row.record)
    if differences:
        return f"no: {len(differences)} differ"
    if differences is None:
        return f"unknown: {reason}"
    if reason:
        return f"steps unknown: {reason}"
    if row.record.backend.claim is not None and row.record.backend.own_forms is None:
        return "yes, as claimed"
    pair = volume_of(row.record)
    return "yes, to the byte" + (" where derived" if pair and pair[1].underived else "")


def _terms(row: Row) -> list[list[object]]:
    record = row.record
    return [
        [*row.cell, d.term, d.expected_bytes, d.textbook_bytes,
         d.difference, d.remark]
        for d in textbook_differences(record) or ()
    ]  # fmt: skip


def _differences(row: Row) -> list[list[object]]:
    record = row.record
    return [
        [*row.cell, d.phase, d.op, d.dtype, d.group, d.measured_bytes,
         d.expected_bytes, d.measured_bytes - d.expected_bytes]
        for d in volume_differences(record) or ()
    ]  # fmt: skip
