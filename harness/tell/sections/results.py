"""The main table, parity levels and losses, scaling, findings, what failed, differences from the textbook,
records, how to read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from harness.judge.agreement.parity import (
    BAND_FACTOR,
    BIAS_FACTOR,
    CUT_BAND,
    TIGHT_FACTOR,
    UNMEASURED_FACTOR,
)
from harness.judge.comparison import Comparison, ScalingPoint, strong_scaling, weak_scaling
from harness.judge.facts import STEP
from harness.judge.findings.finding import DOCUMENT, ROLES, Statement, statements
from harness.judge.library_notes import library_notes
from harness.judge.quantities import loss_unit
from harness.judge.rows import job_marks, reason
from harness.judge.run_conditions import PAUSE_SECONDS, is_deterministic
from harness.judge.statistics import EQUAL, LEAST_FOR_P95, LEVEL, interval_runs
from harness.judge.wording import CellName, counted, entries, listed, name_cells
from harness.nested import grouped
from harness.record import Record
from harness.record.store import RECORD_NAME
from harness.record.workload import depends_on_split
from harness.tell import tables
from harness.tell.document import Block, Column, Folded, Heading, Items, Paragraph, Section, Shown, Table
from harness.tell.formats import number, percent, scientific
from harness.tell.manifest import Manifest
from harness.tell.pictures.plots import (
    loss_picture,
    strong_picture,
    throughput_picture,
    trade_off_picture,
    weak_picture,
)
from harness.tell.tables import (
    LABELS,
    PARITY_ALSO,
    PARITY_WORDS,
    blocks_of,
    prose,
    section,
    table,
    table_columns,
    with_job,
)


def results_section(comparison: Comparison, *, speeds: bool = True) -> Section:
    """One line per job, backend and world size; the spread is folded.

    Without `speeds` only figures that no load of the machine changes.
    """
    shown = tables.results_table(comparison, speeds=speeds)
    blocks = tables.blocks_of(shown, " ".join(tables.legend([shown], comparison.groups)))
    if not speeds:
        return Section("results", "Results", blocks)
    spread = tables.spread_table(comparison)
    if spread is not None:
        runs = max(len(group.rows) for group in comparison.groups)
        speed = tables.prose("results_speed")
        pause = f"{PAUSE_SECONDS / 3600:g}"
        sessions = tables.prose(
            "results_sessions", sessions=tables.sessions_words(comparison.sessions), pause=pause
        )
        title = f"Repeats and spread: {counted(runs, 'run')} of each cell at most"
        blocks += tables.blocks_of(speed, Folded(title, tables.blocks_of(spread, sessions)))
    blocks += tables.blocks_of(throughput_picture(comparison), trade_off_picture(comparison))
    return Section("results", "Results", blocks)


Alike = tuple[str, int, int, str, str | None]
"""Mark of the job, failed runs and all runs of a cell, status, reason without the rank that failed."""


def failures_section(comparison: Comparison) -> Section:
    """Each reason with its cells and their number of runs, or that no cell failed."""
    groups = comparison.groups
    marks = job_marks(groups)
    found: dict[Alike, list[tuple[CellName, Record]]] = {}
    for group in groups:
        # The failed runs of a cell, by status and kind of error.
        kinds = grouped(
            ((record.status, record.error.kind if record.error else why), record)
            for record in (row.record for row in group.rows)
            if (why := reason(record)) is not None
        )
        for failed in kinds.values():
            why = reason(failed[0], with_rank=False)
            alike = marks[failed[0].job_id], len(failed), len(group.rows), failed[0].status, why
            found.setdefault(alike, []).append((group.cell, failed[0]))
    lines = []
    for (job, count, runs, status, why), cells in found.items():
        # Names the rank if it is the same one everywhere.
        reasons = {reason(record) for _, record in cells}
        shown = reasons.pop() if len(reasons) == 1 else why
        how_many = f", {count} of {runs} runs{' of each' if len(cells) > 1 else ''}" if runs > 1 else ""
        lines.append(f"{name_cells([cell for cell, _ in cells])}{job}{how_many}: {status}: {shown}")
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Failed and unsupported cells", [block])


KEY = "surprises_all"


def surprises_all_section(comparison: Comparison) -> Section | None:
    """One line each, largest effect first; None where there are none."""
    rows = [
        [
            name_cells(note.cells), note.what, note.origin, note.library_note.advice,
            note.library_note.since, note.library_note.id, note.figure,
        ]
        for note in library_notes(comparison)
    ]  # fmt: skip
    title = "Differences: from the textbook and from defaults"
    return tables.section(KEY, title, tables.prose("surprises"), tables.table("surprises", rows))


def scaling_section(comparison: Comparison) -> Section | None:
    """None where nothing was run on several numbers of ranks."""
    strong, weak = strong_scaling(comparison), weak_scaling(comparison)
    blocks: list[Block] = []
    for curves, kind, rows, picture in (
        (strong, "strong", _strong_rows(strong), strong_picture(strong)),
        (weak, "weak", [_weak_row(point) for curve in weak for point in curve], weak_picture(weak)),
    ):
        if curves and picture is not None:
            of_kind = tables.table(f"{kind}_scaling", rows, f"scaling_{kind}")
            text = tables.prose(f"scaling_{kind}", legend=tables.LEGEND)
            blocks += tables.blocks_of(Heading(f"{kind.capitalize()} scaling"), picture, of_kind, text)
    return tables.section("scaling", "Scaling", *blocks)


def _strong_rows(curves: Sequence[Sequence[ScalingPoint]]) -> list[list[Any]]:
    """Every point once: a reference that is the base of many stands before them."""
    points = {point.group.key: point for curve in curves for point in curve}
    body = []
    for point in sorted(points.values(), key=lambda point: not point.group.is_reference):
        # 'itself, 1' where the backend is its own base and has there but one layout.
        own = point.base.label in (point.group.label, point.group.backend)
        base = f"{'itself' if own else point.base.label}, {point.base.world_size}"
        ratio = tables.shown_ratio(point.ratio) or point.speed_up
        figures = [point.training_seconds, ratio, point.strong_efficiency, base]
        body.append([*_head(point), *figures, *_details(point)])
    return body


def _weak_row(point: ScalingPoint) -> list[Any]:
    record = point.group.record
    return [
        *_head(point),
        record.initial_weights.parameter_count if record.initial_weights else None,
        record.job.training.global_batch_size,
        point.work_ratio,
        point.step_seconds,
        tables.shown_ratio(point.ratio, percent) or point.weak_efficiency,
        *_details(point),
    ]


def _head(point: ScalingPoint) -> list[Any]:
    world = point.group.record.world
    steps = point.group.values(STEP)
    sizes = [world.nodes, world.world_size, world.threads_per_rank]
    return [point.group.label, *sizes, len(steps), min(steps), max(steps)]


def _details(point: ScalingPoint) -> list[Any]:
    group = point.group
    record = group.record
    return [
        group.figures["samples_per_second"],
        group.figures["peak_bytes"],
        record.last_loss,
        record.eval[-1].loss if record.eval else None,
        group.figures["evaluation_samples_per_second"],
    ]


MOST_OF_A_KIND = 3
"""Sentences about one kind of finding that are not folded."""


def findings_section(comparison: Comparison) -> Section:
    """Every finding and the meaning of its kind, or that there is none; `compare --json` has its figures."""
    found = comparison.findings
    if not found:
        judged = [row for row in comparison.rows if row.judgement.parity != "unjudged"]
        is_judged = any(not row.is_reference for row in judged)
        return Section(
            "findings",
            "Findings",
            tables.blocks_of(tables.prose("findings_none" if is_judged else "findings_unjudged")),
        )
    merged, known = statements(found), entries()
    blocks: list[Block] = []
    for role, heading in ROLES.items():
        of_role = [statement for statement in merged if statement.role == role]
        if of_role:
            blocks += [Heading(heading), *_sentences(of_role)]
    # The entry of the catalogue of each kind that was found, so that a report can be read by itself.
    meanings = {
        f"{name} ({DOCUMENT}#{name})": f"{known[name]['title']}. Cause: {known[name]['cause']} "
        f"Confirm: {known[name]['confirm']} Fix: {known[name]['fix']}"
        for name in dict.fromkeys(statement.id for statement in merged)
    }
    what = "Meaning of each finding, how to confirm and fix it"
    blocks.append(Folded(what, [Items(list(meanings.items()))]))
    return Section("findings", "Findings", blocks)


def _sentences(merged: Sequence[Statement]) -> list[Block]:
    """The first sentences of each kind, and the others folded."""
    of_kind = grouped((statement.id, (statement.id, statement.sentence)) for statement in merged)
    first = [line for lines in of_kind.values() for line in lines[:MOST_OF_A_KIND]]
    rest = {name: lines[MOST_OF_A_KIND:] for name, lines in of_kind.items() if lines[MOST_OF_A_KIND:]}
    if not rest:
        return [Items(first)]
    counts = ", ".join(f"{name} {len(lines)}" for name, lines in rest.items())
    folded = [line for lines in rest.values() for line in lines]
    return [Items(first), Folded(f"More of the same kinds: {counts}", [Items(folded)])]


SIDE = Column("side", "side", align="left")


def records_section(manifest: Manifest) -> Section:
    """Each record's path and digest, once, and what was left out."""
    folders = {entry.path: PurePosixPath(entry.path).parent.parent.as_posix() for entry in manifest.records}
    short = {
        entry.path: entry.run_id
        for entry in manifest.records
        if entry.path == f"{folders[entry.path]}/{entry.run_id}/{RECORD_NAME}"
    }
    sides = manifest.kind == "baseline"
    body = [
        [*(["before" if entry.before else "after"] if sides else []),
         Shown(entry.path, short.get(entry.path, entry.path)), entry.status, entry.sha256]
        for entry in manifest.records
    ]  # fmt: skip
    named = " or ".join(f"{folder}/RUN/{RECORD_NAME}" for folder in sorted({folders[path] for path in short}))
    where = f" A record named by its run alone is {named}." if short else ""
    count = len(manifest.left_out)
    what = "1 other record lies" if count == 1 else f"{count} other records lie"
    columns = tables.table_columns("records")
    blocks = tables.blocks_of(
        tables.prose("records", harness=manifest.harness, drawing=manifest.drawing) + where,
        Table(key="records", columns=[SIDE, *columns] if sides else columns, rows=body),
        f"{what} in the same folder, not part of this report." if count else None,
    )
    return Section("records", "Records", blocks)


def reading_section(comparison: Comparison, *, speeds: bool = True) -> Section:
    """Definitions and formulae of the columns."""
    turns = [tables.prose("records_by_turn")] if any(row.record.turns for row in comparison.rows) else []
    of_speeds = [*_SPEEDS, *turns] if speeds else []
    return Section("reading", "How to read the numbers", [Items([*_COMMON[:1], *of_speeds, *_COMMON[1:]])])


_SPEEDS = tables.prose(
    "records_speeds",
    least_for_p95=LEAST_FOR_P95,
    rounds=interval_runs(),
    level=percent(LEVEL),
    equal=percent(EQUAL),
    chance=percent(1 - LEVEL),
).split("\n")
_COMMON = tables.prose("records_common").split("\n")


MEASURES = (
    ("loss", "loss"), ("norm", "gradient norm"), ("update", "distance moved"), ("weights", "final weights"),
)  # fmt: skip


def levels_section(comparison: Comparison) -> Section | None:
    """None where no run was judged."""
    noises = comparison.noises
    if not noises:
        return None
    levels = [(job_id, noise, level) for job_id, noise in noises.items() for level in noise.levels]
    labels = [label for _, _, level in levels for label in level.repetitions]
    further = [text for option, text in PARITY_ALSO.items() if any(option in label for label in labels)]
    has_band, has_cut = (
        any(getattr(noise, name) is not None for noise in noises.values()) for name in ("band", "cut_band")
    )
    factors = {"tight": TIGHT_FACTOR, "band": BAND_FACTOR, "unmeasured": UNMEASURED_FACTOR}
    shown = {name: f"{factor:g}" for name, factor in factors.items()}
    element = prose("parity_element") if has_band else ""
    cut = prose("parity_cut", cut_band=CUT_BAND) if has_cut else ""
    found = [prose("parity_found", also="".join(further), cut=cut, element=element, **shown)]
    if any(depends_on_split(row.reference.record) for row in comparison.rows if row.reference is not None):
        found.append(prose("parity_at_once"))
    if any(noise.norms for noise in noises.values()):
        found.append(prose("parity_mean", tight=shown["tight"], bias=f"{BIAS_FACTOR:g}"))
    coarse = {
        str(group.rows[0].cell): group.limits.loss
        for group in comparison.groups
        if group.limits is not None and group.is_on_grid
    }
    if coarse:
        allowed = listed(sorted({scientific(limit) for limit in coarse.values()}))
        found.append(prose("parity_grid", cells=listed(list(coarse)), band=shown["band"], limits=allowed))
    several = len(noises) > 1
    limits = [
        [*([job_id] if several else []), level.name, title, seen, level.factor, allowed,
         "measurement" if is_measured else "lower bound"]
        for job_id, noise, level in levels
        for name, title in MEASURES
        for seen in [getattr(level.seen, name)]
        for allowed in [getattr(noise.of_level(level.name), name, None)]
        for is_measured in [seen is not None and allowed is not None and level.factor * seen >= allowed]
    ]  # fmt: skip
    sources = []
    for job_id, _, level in levels:
        by = f"measured by {listed(level.repetitions)}; lower bound: {level.rounding} rounding"
        source = by if level.repetitions else prose("parity_assumed", limits=level.assumed)
        sources.append(f"{f'job {job_id}, ' if several else ''}{level.name}: {source}.")
    # Which run shows the parity of those whose kernels add in any order.
    kernels: dict[str, None] = {}
    for row in comparison.rows:
        run = comparison.parity_run(row)
        if run is not None and not is_deterministic(row.record):
            own = run == row.record.run_id
            kernels[f"{row.cell}: {'its own losses, no other run' if own else run}"] = None
    spreads = comparison.repeat_spreads
    unit = min((loss_unit(row.record) for row in comparison.rows), key=len, default="")
    return section(
        "levels", "Parity levels",
        prose("parity_judged"),
        Items([(level, f"{of['means']}.") for level, of in PARITY_WORDS.items()]),
        " ".join(found),
        table("parity_levels", limits, with_job(table_columns("parity_limits"), several)),
        Items(sources),
        Folded("Difference of each run from the reference", [_distances(comparison)]),
        *(blocks_of(prose("parity_kernels"), Items(list(kernels))) if kernels else []),
        Folded(prose("parity_repeats"), [Items(_spreads(spreads, unit))]) if spreads else None,
    )  # fmt: skip


def _distances(comparison: Comparison) -> Table:
    """Runs of a cell with equal differences share a line."""
    columns = with_job(table_columns("parity_distances"), len(comparison.by_job) > 1)
    keys = [column.key for column in columns]
    before = keys.index("runs")
    keys.remove("runs")
    lines = Counter(tuple(row.figures[key] for key in keys) for row in comparison.rows)
    body = [[*line[:before], runs, *line[before:]] for line, runs in lines.items()]
    return Table(key="parity_distances", columns=columns, rows=body)


def _spreads(spreads: Mapping[str, float | None], unit: str) -> list[str]:
    """A line for each cell whose repeats differ or cannot be compared, and one for all the others."""
    lines = [
        f"{cell}: {scientific(value)} {unit}".rstrip()
        if value is not None
        else f"{cell}: no loss to compare in one of the runs"
        for cell, value in spreads.items()
        if value != 0.0
    ]
    equal = len(spreads) - len(lines)
    if equal:
        cells = f"{'other ' if lines else ''}cell{'s' if equal > 1 else ''} with repeats"
        lines.append(f"{equal} {cells}: losses equal bit for bit")
    return lines


def loss_section(comparison: Comparison) -> Section | None:
    picture = loss_picture(comparison)
    if picture is None:
        return None
    steps = sorted({part.step for row in comparison.rows for part in row.record.eval})
    body = []
    for row in comparison.rows:
        losses = {part.step: part.loss for part in row.record.eval}
        if losses:
            body.append([*row.cell, row.record.repeat, *(losses.get(step) for step in steps)])
    columns = [Column(f"loss_after_step_{step}", f"after step {step}", number) for step in steps]
    held_out = table("held_out_loss", body, (*LABELS, Column("repeat", "repeat"), *columns))
    heading = Heading("Loss on held-out samples (nats per token)") if held_out else None
    return section("loss", "Loss", picture, heading, held_out)
