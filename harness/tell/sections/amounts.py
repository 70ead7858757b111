"""What ranks hold and send: memory, model states, collectives, nodes, checkpoints, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from harness.forms.network import NodeTraffic, node_traffic
from harness.forms.terms import BETWEEN, STATE_KINDS, STEP_PHASES
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, metrics_in
from harness.judge.quantities import (
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
from harness.judge.rows import JudgedRun
from harness.judge.statistics import median_known
from harness.nested import grouped
from harness.record import CheckpointPart, MemoryPart, Record
from harness.tell import tables
from harness.tell.document import Block, Column, Folded, Section, Table
from harness.tell.formats import exact, megabytes, percent
from harness.tell.pictures.plots import memory_picture, volume_picture


def process_memory_blocks(comparison: Comparison) -> list[Block]:
    """A table of those figures that any record has, and why the driver's is missing; [] without any."""
    records = [group.record for group in comparison.groups]
    known = [key for key in tables.PROCESS_MEMORY if any(_by_rank(record, key) for record in records)]
    if not known:
        return []
    columns = [*tables.LABELS]
    body = []
    for key in known:
        title = tables.PROCESS_MEMORY[key]["title"]
        columns += [
            Column(f"{end}_{key}_bytes", f"{title} MB, {end}", megabytes) for end in ("least", "most")
        ]
    for group in comparison.groups:
        sizes = [_by_rank(group.record, key) for key in known]
        if any(sizes):
            ends = (pick(of_key, default=None) for of_key in sizes for pick in (min, max))
            body.append([*group.cell, *ends])
    meanings = "; ".join("{title}: {meaning}".format_map(tables.PROCESS_MEMORY[key]) for key in known)
    moments = [moment for record in records for part in record.ranks for moment in part.memory]
    unknown = sorted({m.device_used_unknown for m in moments if m.device_used_unknown})
    is_of_all = any(moment.device_used_of == "device" for moment in moments)
    whose = tables.prose("memory_of_all_programs" if is_of_all else "memory_driver_unknown")
    return tables.blocks_of(
        tables.prose("process_memory", meanings=meanings),
        tables.table("process_memory", body, columns),
        f"{whose}: {'; '.join(unknown)}." if unknown else None,
    )


def _by_rank(record: Record, key: str) -> list[int]:
    """The largest figure over a rank's moments, of each rank that has any."""
    fields, without = tables.PROCESS_MEMORY[key]["fields"], tables.PROCESS_MEMORY[key].get("without", ())

    def value(moment: MemoryPart) -> int | None:
        sizes = [size for name in fields if (size := getattr(moment, name)) is not None]
        less = [size for name in without if (size := getattr(moment, name)) is not None]
        is_known = sizes and (less or not without)
        return max(sizes) - (less[0] if less else 0) if is_known else None

    found = ([size for m in part.memory if (size := value(m)) is not None] for part in record.ranks)
    return [max(sizes) for sizes in found if sizes]


KINDS = (
    "weights", "gathered", "gradients", "masters", "optimizer", "activations", "communication", "buffers",
    "data", "other_models", "other",
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
    lines = [
        (moment, [*group.cell, MOMENTS[moment]], sizes)
        for group in comparison.groups
        for moment in MOMENTS
        if (sizes := _sizes(group.record, moment)) is not None
    ]
    if not lines:
        return None
    after_backward = [[*head[:-1], *sizes] for at, head, sizes in lines if at == "after_backward"]
    others = [[*head, *sizes] for at, head, sizes in lines if at != "after_backward"]
    moment = Column("moment", "moment", align="left")
    moments = _without_empty("memory_by_moment", [*tables.LABELS, moment], others)
    return tables.section(
        "memory", "Memory after the backward pass, by kind",
        memory_picture(comparison),
        tables.prose("memory"),
        _without_empty("memory_after_backward", tables.LABELS, after_backward),
        Folded("Memory at the other moments", [moments]) if others else None,
        *process_memory_blocks(comparison),
    )  # fmt: skip


def _without_empty(key: str, head: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
    """The table without the kinds that hold nothing in any line."""
    kinds = [Column(f"{kind}_bytes", f"{kind.replace('_', ' ')} MB", megabytes) for kind in KINDS]
    columns = [*head, *kinds, *tables.table_columns("memory_sizes")]
    kept = [n for n, column in enumerate(columns) if column not in kinds or any(row[n] != 0 for row in rows)]
    return Table(key=key, columns=[columns[n] for n in kept], rows=[[row[n] for n in kept] for row in rows])


def _sizes(record: Record, moment: str) -> list[int | None] | None:
    """Kinds of the largest rank, then least, most and peak over the ranks; None: not measured."""
    parts = quantities.memory_at(record, moment)
    if not parts:
        return None
    kinds = quantities.kinds_at(record, moment)
    allocated = [part.allocated_bytes for part in parts if part.allocated_bytes is not None]
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    sizes: list[int | None] = [kinds.get(kind, 0) if kinds else None for kind in KINDS]
    return [*sizes, min(allocated, default=None), max(allocated, default=None), max(peaks, default=None)]


def states_section(comparison: Comparison) -> Section | None:
    """A table of kinds and one of terms; None where no model states were measured."""
    totals: list[list[Any]] = []
    kinds: list[list[Any]] = []
    terms: list[list[Any]] = []
    for group in comparison.groups:
        held = largest(rank_states(group.record))
        if held is None:
            continue
        expected = held.expected.kinds() if held.expected else None
        book = textbook(group.record)
        for kind in STATE_KINDS:
            measured = held.measured.get(kind, 0)
            form = expected.get(kind, 0) if expected is not None else None
            counted = book[kind] if book is not None else None
            if measured or form or counted:
                off = None if form is None else measured - form
                kinds.append([*group.cell, kind, measured, form, off, counted])
        total = held.expected.model_state_bytes if held.expected else None
        off = None if total is None else held.measured_bytes - total
        by_the_book = sum(book.values()) if book is not None else None
        totals.append([*group.cell, held.measured_bytes, total, off, by_the_book])
        terms += [
            [*group.cell, term.kind, term.name, term.bytes, "host" if term.host else "device"]
            for term in (held.expected.terms if held.expected else ())
        ]
    if not totals:
        return None
    columns = tables.table_columns("memory")
    of_kinds = Table(key="model_states", columns=columns, rows=kinds)
    of_terms = tables.table("model_state_terms", terms, "memory_term")
    return tables.section(
        "model_states", "Model states: measured, expected, textbook",
        tables.prose("memory_states"),
        tables.table("model_state_totals", totals, [column for column in columns if column.key != "kind"]),
        Folded("Weights, gradients, masters and optimizer states separately", [of_kinds]),
        Folded("Terms of the closed forms", [of_terms]) if of_terms else None,
    )  # fmt: skip


def prediction_section(comparison: Comparison) -> Section | None:
    """The error of every prediction that a measurement belongs to; None without any."""
    lines: list[list[Any]] = []
    for group in comparison.groups:
        predicted, measured = group.figures["predicted_peak_bytes"], group.figures["peak_bytes"]
        if group.record.prediction is not None and predicted is not None and measured:
            moment = group.record.prediction.moment
            lines.append([*group.cell, predicted, measured, predicted / measured - 1, moment])
    if not lines:
        return None
    errors = [abs(line[-2]) for line in lines]
    text = tables.prose("prediction", mean=percent(mean(errors)), worst=percent(max(errors)))
    return tables.section(
        "prediction", "Predicted memory", text, tables.table("predictions", lines, "memory_prediction")
    )


Key = tuple[str, str, str, str, int]
PHASES = ("setup", "digest", *STEP_PHASES, "evaluation", "checkpoint", "checkpoint_load")
IN_STEPS = (*STEP_PHASES, BETWEEN)
STAGES = "Rank 0 holds the first stage of a pipeline; 'Pipelines' lists what each stage sends."


def communication_section(comparison: Comparison) -> Section | None:
    """Collectives that rank 0 called: per step within the steps, else per run; None without any."""
    body = []
    for group in comparison.groups:
        record = group.record
        probed = record.probed_steps
        own = [row for row in record.comm if row.rank == 0 and probed]
        phases = (f"{row.phase}: {row.by}" if row.by else row.phase for row in own)
        kinds = grouped(
            ((phase, row.op, row.dtype, row.role, row.group_size), row)
            for phase, row in zip(phases, own, strict=True)
        )
        expected = _expected(record)
        for key in sorted(
            kinds, key=lambda key: (PHASES.index(key[0]) if key[0] in PHASES else len(PHASES), key)
        ):
            parts, times, payload = kinds[key], probed if key[0].startswith(IN_STEPS) else 1, expected(key)
            known = [part.largest_bytes for part in parts if part.largest_bytes is not None]
            sums = (sum(part.calls for part in parts), sum(part.payload_bytes for part in parts), payload)
            per_step = (None if one is None else one / times for one in sums)
            body.append([*group.cell, *key, *per_step, max(known, default=None)])
    pairs = [pair for row in comparison.rows if (pair := volume_of(row.record)) is not None]
    reasons = [
        f"No closed form of {' and '.join(part.dtypes) or 'any dtype'} in a {part.phase}: {part.reason}."
        for part in dict.fromkeys(part for _, volume in pairs for part in volume.underived)
    ]
    has_stages = any(group.record.world.mesh.size("pipeline") > 1 for group in comparison.groups)
    meaning = f"{tables.prose('collectives')} {STAGES}" if has_stages else tables.prose("collectives")
    return tables.section(
        "communication", "Collectives of rank 0", meaning, tables.table("collectives", body), *reasons
    )


def _expected(record: Record) -> Callable[[Key], int | None]:
    """Payload in closed form of a kind of collective; None where it is not known."""
    pair = volume_of(record)
    if pair is None:
        return lambda key: None
    volume, payload = pair[1], expected_payload(pair[1], pair[0].mesh)
    return lambda key: payload.get(key[:4], 0) if is_derived(volume, key[0], key[2]) else None


VOLUME = metrics_in("volume")
COLUMNS_VOLUME = (
    *tables.LABELS,
    *(Column(one.key, one.title.replace("sent", "measured").replace("MB", "bytes"), exact) for one in VOLUME),
    Column("payload", "payload as expected", align="left"),
)


def volume_section(comparison: Comparison) -> Section | None:
    """The volumes of each backend, and two tables that explain how they differ; None without figures."""
    firsts: list[JudgedRun] = []
    for group in comparison.groups:
        # The first repeat that was counted, and those that sent other bytes.
        distinct: dict[float, JudgedRun] = {}
        for row in group.rows:
            if (sent := row.figures[SENT]) is not None:
                distinct.setdefault(sent, row)
        firsts += (list(distinct.values()) or [group.rows[0]]) if group.record.comm else []
    volumes = [[*r.cell, *(r.figures[metric.key] for metric in VOLUME), _verdict(r)] for r in firsts]
    explained = {
        "communication_terms": [
            [*row.cell, d.term, d.expected_bytes, d.textbook_bytes, d.difference, d.remark]
            for row in firsts
            for d in textbook_differences(row.record) or ()
        ],
        "communication_differences": [
            [
                *row.cell, d.phase, d.op, d.dtype, d.group, d.measured_bytes, d.expected_bytes,
                d.measured_bytes - d.expected_bytes,
            ]
            for row in firsts
            for d in volume_differences(row.record) or ()
        ],
    }  # fmt: skip
    return tables.section(
        "communication_volume", "Communication: measured, expected, textbook",
        volume_picture(comparison),
        tables.prose("volume"),
        tables.prose("communication_sharing") if any(row.record.world.dimensions for row in firsts) else None,
        tables.table("communication_volume", volumes, COLUMNS_VOLUME),
        *(tables.table(key, rows, caption=tables.prose(f"{key}_caption")) for key, rows in explained.items()),
    )  # fmt: skip


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
    probed = record.probed_steps
    hosts = {part.rank: part.host for part in record.ranks}
    if not probed or len(hosts) < record.world.world_size or not all_ranks_counted(record):
        return []
    totals: dict[str, dict[str, NodeTraffic]] = {host: {} for host in dict.fromkeys(hosts.values())}
    for row in record.comm:
        if row.phase not in STEP_PHASES:
            continue
        traffic = node_traffic(
            record.world.collectives, row.op, row.payload_bytes, row.group_ranks, row.rank, hosts,
            phase=row.phase,
        )  # fmt: skip
        by_role = totals[hosts[row.rank]]
        by_role[row.role] = by_role.get(row.role, NodeTraffic()) + traffic
    return [
        NodeVolume(
            host=host,
            inside=sum(traffic.inside for traffic in by_role.values()) / probed,
            between=sum(traffic.between for traffic in by_role.values()) / probed,
            between_by_role={role: t.between / probed for role, t in by_role.items() if t.between},
        )
        for host, by_role in totals.items()
    ]


ROLES = ("world", "shard", "replica")
"""Groups that have a column always; the others where they send between nodes."""


def nodes_section(comparison: Comparison) -> Section | None:
    """A line for each cell, of its first run that was counted; None if every run was on one node."""
    found = []
    for group in comparison.groups:
        on_nodes = group.rows if group.record.world.nodes > 1 else []
        volumes = next(filter(None, (node_volumes(row.record) for row in on_nodes)), [])
        if volumes:
            found.append((group, max(volumes, key=lambda volume: volume.between)))
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
    nodes = tables.table("nodes", body, "nodes", *of_roles)
    return tables.section("nodes", "Within and between nodes", tables.prose("nodes"), nodes)


CHECKPOINT_PHASES = {"save": "checkpoint", "load": "checkpoint_load"}


def checkpoints_section(comparison: Comparison) -> Section | None:
    """None if no run saved, loaded or continued a checkpoint."""
    # One line for each checkpoint saved or loaded, over all ranks.
    costs = [
        [*g.cell, *_cost(g.record, parts)]
        for g in comparison.groups
        for parts in zip(*(r.checkpoints for r in g.record.ranks), strict=False)
    ]
    resumed = [
        [*g.cell, saved.backend, saved.world_size, saved.format, saved.step, saved.run_id]
        for g in comparison.groups
        if (saved := g.record.resumed)
    ]
    return tables.section(
        "checkpoints", "Checkpoints",
        tables.table("checkpoints", costs, "checkpoints_costs"),
        tables.prose("checkpoints_costs") if costs else None,
        tables.table("resumed", resumed, "checkpoints_resumed"),
        tables.prose("checkpoints_resumed") if resumed else None,
    )  # fmt: skip


def _cost(record: Record, parts: tuple[CheckpointPart, ...]) -> list[Any]:
    first = parts[0]
    payload = sum(
        r.payload_bytes for r in record.comm if r.rank == 0 and r.phase == CHECKPOINT_PHASES[first.operation]
    )
    known = [(p.host_before_bytes, p.host_peak_bytes) for p in parts if p.host_peak_bytes is not None]
    growth = max((most - before for before, most in known if before is not None), default=None)
    peak = max((most for _, most in known), default=None)
    seconds = max(part.seconds for part in parts)
    return [first.operation, first.format, first.step, seconds, first.file_bytes, payload, growth, peak]


def pipeline_section(comparison: Comparison) -> Section | None:
    """None where no run is a pipeline."""
    found = [
        (group.cell, uses)
        for group in comparison.groups
        if (uses := [use for row in group.rows if (use := pipeline_use(row.record))])
    ]
    columns, of_stage = (tables.table_columns(name) for name in ("pipeline", "pipeline_stage"))
    summary = [
        [*cell, *tables.row_of(columns[2:-1], uses[0]), median_known(use["measured_bubble"] for use in uses)]
        for cell, uses in found
    ]
    stages = [
        [*cell, *tables.row_of(of_stage[2:], stage)] for cell, uses in found for stage in uses[0]["by_rank"]
    ]
    return tables.section(
        "pipeline", "Pipelines",
        tables.table("pipelines", summary, columns),
        tables.table("pipeline_stages", stages, of_stage),
        tables.prose("pipeline"),
    )  # fmt: skip
