"""What ranks hold and send: memory, model states, collectives, nodes, checkpoints, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import STATE_KINDS, STEP_PHASES
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, metrics_in
from harness.judge.quantities import (
    PipelineUse,
    all_ranks_counted,
    expected_payload,
    is_derived,
    largest,
    pipeline_use,
    rank_states,
    textbook,
    textbook_differences,
    volume_differences,
    volume_of,
    why_unknown,
)
from harness.judge.rows import CellRuns, JudgedRun
from harness.judge.statistics import median_known
from harness.record import CheckpointPart, CommunicationPart, MemoryPart, Record
from harness.tell.document import Block, Column, Folded, Paragraph, Section, Table
from harness.tell.formats import exact, megabytes, percent
from harness.tell.tables import LABELS, prose, row_of, table_columns


def fragmentation_bytes(moment: MemoryPart) -> int | None:
    """What the caching allocator holds of the device and nobody uses or waits for."""
    used = moment.allocated_bytes if moment.active_bytes is None else moment.active_bytes
    return None if moment.reserved_bytes is None or used is None else moment.reserved_bytes - used


FIGURES: tuple[tuple[str, str, str, Callable[[MemoryPart], int | None]], ...] = (
    (
        "active_peak",
        "active",
        "allocated, and freed while another stream may still use it: the most in use at once",
        lambda m: m.active_peak_bytes,
    ),
    (
        "reserved",
        "reserved",
        "device memory that the caching allocator holds",
        lambda m: _most(m.reserved_bytes, m.reserved_peak_bytes),
    ),
    ("fragmentation", "fragmented", "reserved, but not active at that moment", fragmentation_bytes),
    (
        "device_used",
        "driver",
        "device memory in use as the driver counts it, context and NCCL included; an allocation fails where "
        "it would exceed the device's memory",
        lambda m: m.device_used_bytes,
    ),
    ("pinned", "pinned", "page-locked host memory that torch allocated", lambda m: m.pinned_bytes),
    (
        "host_resident",
        "resident",
        "the process's resident set on the host, libraries included",
        lambda m: m.host_resident_bytes,
    ),
)
"""Key, title, meaning and value at one moment."""


def _most(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def process_memory_blocks(comparison: Comparison) -> list[Block]:
    """A table of those figures that any record has, and why the driver's is missing; [] without any."""
    groups = comparison.groups
    records = [group.record for group in groups]
    known = [figure for figure in FIGURES if any(_by_rank(record, figure[3]) for record in records)]
    if not known:
        return []
    columns = [*LABELS]
    for key, title, _, _ in known:
        columns.append(Column(f"least_{key}_bytes", f"{title} MB, least", megabytes))
        columns.append(Column(f"most_{key}_bytes", f"{title} MB, most", megabytes))
    body: list[list[Any]] = []
    for group in groups:
        line: list[Any] = [*group.cell]
        for _, _, _, value in known:
            sizes = _by_rank(group.record, value)
            line += [min(sizes, default=None), max(sizes, default=None)]
        if any(size is not None for size in line[2:]):
            body.append(line)
    meanings = "; ".join(f"{title}: {meaning}" for _, title, meaning, _ in known)
    text = (
        "Beyond live tensors. Of each rank the largest figure over all moments recorded; least and most: on "
        f"the rank where that is smallest and largest. {meanings}."
    )
    moments = [moment for record in records for part in record.ranks for moment in part.memory]
    unknown = sorted({m.device_used_unknown for m in moments if m.device_used_unknown})
    is_of_all = any(moment.device_used_of == "device" for moment in moments)
    whose = prose("memory_of_all_programs" if is_of_all else "memory_driver_unknown")
    return [
        Paragraph(text),
        Table(key="process_memory", columns=columns, rows=body),
        *([Paragraph(f"{whose}: {'; '.join(unknown)}.")] if unknown else []),
    ]


def _by_rank(record: Record, value: Callable[[MemoryPart], int | None]) -> list[int]:
    """The largest over a rank's moments, of each rank that has any."""
    found = ([size for m in part.memory if (size := value(m)) is not None] for part in record.ranks)
    return [max(sizes) for sizes in found if sizes]


KINDS = (
    "weights", "gathered", "gradients", "masters", "optimizer", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip
MOMENTS = {
    "after_setup": "after setup",
    "after_forward": "after forward",
    "after_backward": "after backward",
    "after_step": "after step",
    "during_evaluation": "evaluation",
    "during_checkpoint": "checkpoint",
    "during_checkpoint_load": "checkpoint loaded",
}


def memory_section(comparison: Comparison) -> Section | None:
    """Live bytes by kind after the backward pass, and at the others; None if nothing was counted."""
    after_backward: list[list[Any]] = []
    others: list[list[Any]] = []
    for group in comparison.groups:
        head = group.cell
        for moment, title in MOMENTS.items():
            line = _line(group.record, moment)
            if line is not None:
                if moment == "after_backward":
                    after_backward.append([*head, *line])
                else:
                    others.append([*head, title, *line])
    if not others and not after_backward:
        return None
    columns = [
        *(Column(f"{kind}_bytes", f"{kind} MB", megabytes) for kind in KINDS),
        Column("least_allocated_bytes", "least MB", megabytes),
        Column("most_allocated_bytes", "most MB", megabytes),
        Column("peak_bytes", "peak MB", megabytes),
    ]
    table = _table("memory_after_backward", [*LABELS, *columns], after_backward)
    moments = _table(
        "memory_by_moment", [*LABELS, Column("moment", "moment", align="left"), *columns], others
    )
    blocks: list[Block] = [
        Paragraph(prose("memory")),
        table,
        *([Folded("Memory at the other moments", [moments])] if others else []),
        *process_memory_blocks(comparison),
    ]
    return Section("memory", "Memory after the backward pass, by kind", blocks)


def _table(key: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
    """Without the kinds that hold nothing in any line."""
    kinds = {f"{kind}_bytes" for kind in KINDS}
    kept = [
        index
        for index, column in enumerate(columns)
        if column.key not in kinds or any(row[index] != 0 for row in rows)
    ]
    return Table(
        key=key, columns=[columns[index] for index in kept], rows=[[row[i] for i in kept] for row in rows]
    )


def _line(record: Record, moment: str) -> list[int | None] | None:
    """Kinds of the largest rank, then least, most and peak over the ranks; None: not measured."""
    parts = quantities.memory_at(record, moment)
    if not parts:
        return None
    kinds = quantities.kinds_at(record, moment)
    allocated = [part.allocated_bytes for part in parts if part.allocated_bytes is not None]
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    sizes: list[int | None] = [kinds.get(kind, 0) if kinds else None for kind in KINDS]
    return [
        *sizes,
        min(allocated, default=None),
        max(allocated, default=None),
        max(peaks, default=None),
    ]


COLUMNS = table_columns("memory")
KIND = [column.key for column in COLUMNS].index("kind")
ALL = "all"
"""The kind of the line that sums up the others."""


def states_section(comparison: Comparison) -> Section | None:
    """A table of kinds and one of terms; None where no model states were measured."""
    kinds: list[list[Any]] = []
    terms: list[list[Any]] = []
    for group in comparison.groups:
        kinds += _kinds(group)
        terms += _terms(group)
    if not kinds:
        return None
    totals = [[*line[:KIND], *line[KIND + 1 :]] for line in kinds if line[KIND] == ALL]
    table = Table(key="model_state_totals", columns=[*COLUMNS[:KIND], *COLUMNS[KIND + 1 :]], rows=totals)
    by_kind = Table(key="model_states", columns=COLUMNS, rows=[line for line in kinds if line[KIND] != ALL])
    by_term = Table(key="model_state_terms", columns=table_columns("memory_term"), rows=terms)
    blocks: list[Block] = [
        Paragraph(prose("memory_states")),
        table,
        Folded("Weights, gradients, masters and optimizer states separately", [by_kind]),
        *([Folded("Terms of the closed forms", [by_term])] if terms else []),
    ]
    return Section("model_states", "Model states: measured, expected, textbook", blocks)


def _kinds(group: CellRuns) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None:
        return []
    expected = held.expected.kinds() if held.expected else None
    book = textbook(group.record)
    lines = []
    for kind in STATE_KINDS:
        measured = held.measured.get(kind, 0)
        form = expected.get(kind, 0) if expected is not None else None
        counted = book[kind] if book is not None else None
        if measured or form or counted:
            off = None if form is None else measured - form
            lines.append([*group.cell, kind, measured, form, off, counted])
    total = held.expected.model_state_bytes if held.expected else None
    off = None if total is None else held.measured_bytes - total
    by_the_book = sum(book.values()) if book is not None else None
    return [*lines, [*group.cell, ALL, held.measured_bytes, total, off, by_the_book]]


def _terms(group: CellRuns) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None or held.expected is None:
        return []
    return [
        [*group.cell, term.kind, term.name, term.bytes, "host" if term.host else "device"]
        for term in held.expected.terms
    ]


def prediction_section(comparison: Comparison) -> Section | None:
    """The error of every prediction that a measurement belongs to; None without any."""
    lines: list[list[Any]] = []
    errors = []
    for group in comparison.groups:
        predicted, measured = group.figures["predicted_peak_bytes"], group.figures["peak_bytes"]
        if group.record.prediction is None or predicted is None or not measured:
            continue
        error = predicted / measured - 1
        errors.append(abs(error))
        lines.append([*group.cell, predicted, measured, error, group.record.prediction.moment])
    if not errors:
        return None
    text = prose("prediction", mean=percent(mean(errors)), worst=percent(max(errors)))
    table = Table(key="predictions", columns=table_columns("memory_prediction"), rows=lines)
    return Section("prediction", "Predicted memory", [Paragraph(text), table])


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
    volumes = [[*r.cell, *(r.figures[metric.key] for metric in VOLUME), _verdict(r)] for r in firsts]
    terms = [
        [*row.cell, d.term, d.expected_bytes, d.textbook_bytes, d.difference, d.remark]
        for row in firsts
        for d in textbook_differences(row.record) or ()
    ]
    differences = [
        [
            *row.cell, d.phase, d.op, d.dtype, d.group, d.measured_bytes, d.expected_bytes,
            d.measured_bytes - d.expected_bytes,
        ]
        for row in firsts
        for d in volume_differences(row.record) or ()
    ]  # fmt: skip
    blocks: list[Block] = [
        Paragraph(prose("volume")),
        *([Paragraph(SHARING)] if any(row.record.world.dimensions for row in firsts) else []),
        Table(key="communication_volume", columns=COLUMNS_VOLUME, rows=volumes),
    ]
    for key, rows in (("communication_terms", terms), ("communication_differences", differences)):
        if rows:
            blocks.append(
                Table(key=key, columns=table_columns(key), rows=rows, caption=prose(f"{key}_caption"))
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


def _verdict(row: JudgedRun) -> str:
    differences, reason = volume_differences(row.record), why_unknown(row.record)
    if differences:
        return f"no: {len(differences)} differ"
    if differences is None or reason:
        return f"not judged: {reason}"
    if row.record.backend.claim is not None and row.record.backend.own_forms is None:
        return "yes, as claimed"
    pair = volume_of(row.record)
    return "yes, to the byte" + (" where derived" if pair and pair[1].underived else "")


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
            group.label, group.record.world.nodes, group.record.world.world_size, most.inside, most.between,
            *(most.between_by_role.get(role, 0.0) for role in roles),
        ]
        for group, most in found
    ]  # fmt: skip
    # Of the groups of ranks that one role names: 'data+sequence' lies along both dimensions.
    of_roles = [
        Column(
            f"between_{role.replace('+', '_')}_bytes_per_step",
            "by all ranks MB" if role == "world" else f"by {role} groups MB",
            megabytes,
        )
        for role in roles
    ]
    table = Table(key="nodes", columns=[*table_columns("nodes"), *of_roles], rows=body)
    return Section("nodes", "Within and between nodes", [Paragraph(prose("nodes")), table])


COSTS = table_columns("checkpoints_costs")
RESUMED = table_columns("checkpoints_resumed")
RESUMED_TEXT = prose("checkpoints_resumed")
CHECKPOINT_PHASES = {"save": "checkpoint", "load": "checkpoint_load"}


def checkpoints_section(comparison: Comparison) -> Section | None:
    """None if no run saved, loaded or continued a checkpoint."""
    groups = comparison.groups
    # One line for each checkpoint saved or loaded, over all ranks.
    costs = [
        [*g.cell, *_cost(g.record, parts)]
        for g in groups
        for parts in zip(*(r.checkpoints for r in g.record.ranks), strict=False)
    ]
    resumed = [
        [*g.cell, saved.backend, saved.world_size, saved.format, saved.step, saved.run_id]
        for g in groups
        if (saved := g.record.resumed)
    ]
    blocks: list[Block] = []
    if costs:
        blocks += [Table(key="checkpoints", columns=COSTS, rows=costs), Paragraph(prose("checkpoints_costs"))]
    if resumed:
        blocks += [Table(key="resumed", columns=RESUMED, rows=resumed), Paragraph(RESUMED_TEXT)]
    return Section("checkpoints", "Checkpoints", blocks) if blocks else None


def _cost(record: Record, parts: tuple[CheckpointPart, ...]) -> list[Any]:
    first = parts[0]
    payload = sum(
        r.payload_bytes for r in record.comm if r.rank == 0 and r.phase == CHECKPOINT_PHASES[first.operation]
    )
    peaks = [part.host_peak_bytes for part in parts if part.host_peak_bytes is not None]
    growths = [
        part.host_peak_bytes - part.host_before_bytes
        for part in parts
        if part.host_peak_bytes is not None and part.host_before_bytes is not None
    ]
    seconds = max(part.seconds for part in parts)
    growth, peak = max(growths, default=None), max(peaks, default=None)
    return [first.operation, first.format, first.step, seconds, first.file_bytes, payload, growth, peak]


STAGE_COLUMNS = table_columns("pipeline_stage")


def pipeline_section(comparison: Comparison) -> Section | None:
    """None where no run is a pipeline."""
    found = [(group, uses) for group in comparison.groups if (uses := _uses(group))]
    if not found:
        return None
    summary = [
        [
            *group.cell,
            uses[0].schedule,
            uses[0].stages,
            group.cell.world_size // uses[0].ranks,
            uses[0].micro_batches,
            uses[0].expected_bubble,
            median_known([use.measured_bubble for use in uses]),
        ]
        for group, uses in found
    ]
    stages = [
        [
            *group.cell,
            stage.rank,
            ", ".join(map(str, stage.stages)),
            *row_of(STAGE_COLUMNS[4:], stage),
        ]
        for group, uses in found
        for stage in uses[0].by_rank
    ]
    return Section(
        "pipeline",
        "Pipelines",
        [
            Table(key="pipelines", columns=table_columns("pipeline"), rows=summary),
            Table(key="pipeline_stages", columns=STAGE_COLUMNS, rows=stages),
            Paragraph(prose("pipeline")),
        ],
    )


def _uses(group: CellRuns) -> list[PipelineUse]:
    return [use for row in group.rows if (use := pipeline_use(row.record)) is not None]
