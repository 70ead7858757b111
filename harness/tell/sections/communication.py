"""Collectives by kind, measured against expected bytes, and what crosses between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import STEP_PHASES
from harness.judge.comparison import Comparison
from harness.judge.metrics import SENT, metrics_in
from harness.judge.quantities.measures import all_ranks_counted
from harness.judge.quantities.volume import (
    expected_payload,
    is_derived,
    textbook_differences,
    volume_differences,
    volume_of,
    why_unknown,
)
from harness.judge.repeats import CellRuns
from harness.judge.rows import JudgedRun
from harness.record import CommunicationPart, Record
from harness.tell.document import Block, Column, Paragraph, Section, Table
from harness.tell.formats import exact, megabytes
from harness.tell.tables import LABELS, prose, table_columns

Key = tuple[str, str, str, str, int]
PHASES = ("setup", "digest", *STEP_PHASES, "evaluation", "checkpoint", "checkpoint_load")
MEANING = prose("collectives")
STAGES = "Rank 0 holds the first stage of a pipeline; 'Pipelines' lists what each stage sends."


def communication_section(comparison: Comparison) -> Section | None:
    """Collectives that rank 0 called: per step within the steps, else per run; None without any."""
    body = []
    for group in comparison.groups:
        record = group.record
        probed = record.windows.probed if record.windows else 0
        kinds: dict[Key, list[CommunicationPart]] = {}
        for row in record.comm:
            if row.rank == 0:
                kinds.setdefault((row.phase, row.op, row.dtype, row.role, row.group_size), []).append(row)
        expected = _expected(record)
        if probed:
            body += [
                [
                    *group.cell,
                    *key,
                    *_sums(kinds[key], times, expected(key)),
                ]
                for key in sorted(kinds, key=_order)
                for times in (probed if key[0] in STEP_PHASES else 1,)
            ]
    if not body:
        return None
    table = Table(key="collectives", columns=table_columns("collectives"), rows=body)
    has_stages = any(group.record.world.mesh.size("pipeline") > 1 for group in comparison.groups)
    meaning = f"{MEANING} {STAGES}" if has_stages else MEANING
    return Section(
        "communication", "Collectives of rank 0", [Paragraph(meaning), table, *_reasons(comparison)]
    )


def _reasons(comparison: Comparison) -> list[Block]:
    """Why parts of phases have no closed form, each reason once."""
    pairs = [pair for row in comparison.rows if (pair := volume_of(row.record)) is not None]
    parts = dict.fromkeys(part for _, volume in pairs for part in volume.underived)
    return [
        Paragraph(
            f"No closed form of {' and '.join(part.dtypes) or 'any dtype'} in a {part.phase}: {part.reason}."
        )
        for part in parts
    ]


def _expected(record: Record) -> Callable[[Key], int | None]:
    """Payload in closed form of a kind of collective; None where it is not known."""
    pair = volume_of(record)
    if pair is None:
        return lambda key: None
    volume, payload = pair[1], expected_payload(pair[1], pair[0].mesh)
    return lambda key: payload.get(key[:4], 0) if is_derived(volume, key[0], key[2]) else None


def _sums(parts: Sequence[CommunicationPart], times: int, expected: int | None) -> list[float | None]:
    """Calls, payload and expected payload, divided by `times`, and the largest call's payload."""
    largest = [part.largest_bytes for part in parts if part.largest_bytes is not None]
    return [
        sum(part.calls for part in parts) / times,
        sum(part.payload_bytes for part in parts) / times,
        None if expected is None else expected / times,
        max(largest, default=None),
    ]


def _order(key: Key) -> tuple[int, Key]:
    return PHASES.index(key[0]) if key[0] in PHASES else len(PHASES), key


VOLUME = metrics_in("volume")
COLUMNS_VOLUME = (
    *LABELS,
    *(Column(metric.key, "measured" if metric.key == SENT else metric.title, exact) for metric in VOLUME),
    Column("payload", "payload as expected", align="left"),
)

SHARING = prose("communication_sharing")


def volume_section(comparison: Comparison) -> Section | None:
    """The volumes of each backend, and two tables that explain how they differ; None without figures."""
    firsts = [row for group in comparison.groups if group.record.comm for row in _distinct(group)]
    if not firsts:
        return None
    blocks: list[Block] = [
        Paragraph(prose("volume")),
        *([Paragraph(SHARING)] if any(row.record.world.dimensions for row in firsts) else []),
        Table(key="communication_volume", columns=COLUMNS_VOLUME, rows=[_line(row) for row in firsts]),
    ]
    terms = [line for row in firsts for line in _terms(row)]
    if terms:
        blocks.append(
            Table(
                key="communication_terms",
                columns=table_columns("communication_terms"),
                rows=terms,
                caption="Expected minus textbook, term by term, in bytes sent per step",
            )
        )
    differences = [line for row in firsts for line in _differences(row)]
    if differences:
        blocks.append(
            Table(
                key="communication_differences",
                columns=table_columns("communication_differences"),
                rows=differences,
                caption="Measured payload that is not as expected, in bytes over the probed steps (setup, "
                "evaluation and digest: over the run)",
            )
        )
    return Section("communication_volume", "Communication: measured, expected, textbook", blocks)


def _distinct(group: CellRuns) -> list[JudgedRun]:
    """The first repeat that was counted, and those that sent other bytes."""
    found: dict[float, JudgedRun] = {}
    for row in group.rows:
        sent = row.figures[SENT]
        if sent is not None:
            found.setdefault(sent, row)
    return list(found.values()) or [group.rows[0]]


def _line(row: JudgedRun) -> list[object]:
    values = row.figures
    return [*row.cell, *(values[metric.key] for metric in VOLUME), _verdict(row)]


def _verdict(row: JudgedRun) -> str:
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


def _terms(row: JudgedRun) -> list[list[object]]:
    record = row.record
    return [
        [*row.cell, d.term, d.expected_bytes, d.textbook_bytes,
         d.difference, d.remark]
        for d in textbook_differences(record) or ()
    ]  # fmt: skip


def _differences(row: JudgedRun) -> list[list[object]]:
    record = row.record
    return [
        [*row.cell, d.phase, d.op, d.dtype, d.group, d.measured_bytes,
         d.expected_bytes, d.measured_bytes - d.expected_bytes]
        for d in volume_differences(record) or ()
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NodeVolume:
    """What the ranks of one node send per optimizer step, bytes."""

    host: str
    inside: float
    between: float
    between_by_role: dict[str, float]
    """By what the group is for: world, shard, replica, or dimensions of ranks that share samples."""


def node_volumes(record: Record) -> list[NodeVolume]:
    """One for each node in the order of the ranks; empty where nothing was counted.

    Counts what the transport really sends, emulated collectives included (`harness.forms.network`).
    """
    probed = record.windows.probed if record.windows else 0
    hosts = {part.rank: part.host for part in record.ranks}
    if not probed or len(hosts) < record.world.world_size or not all_ranks_counted(record):
        return []
    totals: dict[str, dict[str, NodeTraffic]] = {host: {} for host in dict.fromkeys(hosts.values())}
    for row in record.comm:
        if row.phase not in STEP_PHASES:
            continue
        traffic = node_traffic(
            record.world.collectives,
            row.op,
            row.payload_bytes,
            row.group_ranks,
            row.rank,
            hosts,
            phase=row.phase,
        )
        by_role = totals[hosts[row.rank]]
        by_role[row.role] = by_role.get(row.role, NodeTraffic()) + traffic
    return [
        NodeVolume(
            host=host,
            inside=sum(traffic.inside for traffic in by_role.values()) / probed,
            between=sum(traffic.between for traffic in by_role.values()) / probed,
            between_by_role={
                role: traffic.between / probed for role, traffic in by_role.items() if traffic.between
            },
        )
        for host, by_role in totals.items()
    ]


ROLES = ("world", "shard", "replica")
"""Groups that have a column always; the others where they send between nodes."""


def nodes_section(comparison: Comparison) -> Section | None:
    """A line for each cell, of its first run that was counted; None if every run was on one node."""
    found = []
    for group in comparison.groups:
        record = group.record
        of_runs = [node_volumes(row.record) for row in group.rows] if record.world.nodes > 1 else []
        volumes = next(filter(None, of_runs), [])
        if volumes:
            found.append((group, max(volumes, key=lambda volume: volume.between)))
    if not found:
        return None
    roles = list(dict.fromkeys([*ROLES, *(role for _, most in found for role in most.between_by_role)]))
    body = [
        [
            group.label,
            group.record.world.nodes,
            group.record.world.world_size,
            most.inside,
            most.between,
            *(most.between_by_role.get(role, 0.0) for role in roles),
        ]
        for group, most in found
    ]
    table = Table(key="nodes", columns=[*table_columns("nodes"), *map(_column, roles)], rows=body)
    return Section("nodes", "Within and between nodes", [Paragraph(prose("nodes")), table])


def _column(role: str) -> Column:
    """Of the groups of ranks that one role names: 'data+sequence' lies along both dimensions."""
    key = f"between_{role.replace('+', '_')}_bytes_per_step"
    return Column(key, "by all ranks MB" if role == "world" else f"by {role} groups MB", megabytes)
