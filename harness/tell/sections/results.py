"""The main table, scaling, findings, what failed, differences from the textbook, records, how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from harness.judge.comparison import Comparison, ScalingPoint, strong_scaling, weak_scaling
from harness.judge.facts import STEP
from harness.judge.findings.finding import DOCUMENT, ROLES, Finding, Statement, kinds, role_of, statements
from harness.judge.library_notes import library_notes
from harness.judge.quantities import unjudged_amounts
from harness.judge.rows import CellRuns, job_marks, reason
from harness.judge.run_conditions import PAUSE_SECONDS
from harness.judge.statistics import EQUAL, LEAST_FOR_P95, LEVEL, interval_runs
from harness.judge.wording import Backends, CellName, counted, listed, name_cells, words
from harness.record import Record
from harness.record.store import RECORD_NAME
from harness.tell.document import Block, Column, Folded, Heading, Items, Paragraph, Section, Shown, Table
from harness.tell.formats import milliseconds, percent
from harness.tell.manifest import Manifest, RecordEntry
from harness.tell.pictures.plots import strong_picture, throughput_picture, trade_off_picture, weak_picture
from harness.tell.tables import (
    LEGEND,
    NO_TEXT,
    WITHOUT_FORM,
    WITHOUT_FORM_MEANS,
    clock_words,
    of_no_text,
    prose,
    results_table,
    sessions_words,
    shown_ratio,
    spread_table,
    table_columns,
)


def results_without_speeds(comparison: Comparison) -> Section:
    """One line per job, backend and world size, of figures that no load of the machine changes."""
    blocks = [results_table(comparison, speeds=False), *_without_form(comparison)]
    return Section("results", "Results", blocks)


def _without_form(comparison: Comparison) -> list[Block]:
    """What the mark of cells means whose bytes and memory no closed form judges; nothing if none has it."""
    labels = dict.fromkeys(group.label for group in comparison.groups if unjudged_amounts(group.record))
    if not labels:
        return []
    return [Paragraph(f"{WITHOUT_FORM}: {WITHOUT_FORM_MEANS} ({listed(list(labels))}).")]


def results_section(comparison: Comparison) -> Section:
    """One line per job, backend and world size; the spread is folded."""
    blocks: list[Block] = [results_table(comparison), *_without_form(comparison)]
    spread = spread_table(comparison)
    if spread is not None:
        runs = max(len(group.rows) for group in comparison.groups)
        text = (
            f"speed: {LEGEND}. n/a for the reference, for a cell without another to compare with, and for "
            f"one that diverged, since it did other work. {clock_words(comparison)}"
        )
        sessions = (
            f"Runs are from {sessions_words(comparison.sessions)}. A pause of more than "
            f"{PAUSE_SECONDS / 3600:g} h between two runs, or another host, begins a session. within one "
            "and between them: largest less smallest mean timed step of the runs of a session, and of the "
            "medians of sessions, relative to the median."
        )
        title = f"Repeats and spread: {counted(runs, 'run')} of each cell at most"
        blocks += [Paragraph(text.rstrip()), Folded(title, [spread, Paragraph(sessions)])]
    pictures = (throughput_picture(comparison), trade_off_picture(comparison))
    blocks += [picture for picture in pictures if picture is not None]
    return Section("results", "Results", blocks)


Alike = tuple[str, int, int, str, str | None]
"""Mark of the job, failed runs and all runs of a cell, status, reason without the rank that failed."""


def failures_section(comparison: Comparison) -> Section:
    """Each reason with its cells and their number of runs, or that no cell failed."""
    groups = comparison.groups
    marks = job_marks(groups)
    found: dict[Alike, list[tuple[CellName, Record]]] = {}
    for group in groups:
        for failed in _by_error(group):
            first = failed[0]
            why = reason(first, with_rank=False)
            alike = marks[first.job_id], len(failed), len(group.rows), first.status, why
            found.setdefault(alike, []).append((group.cell, first))
    lines = [_line(alike, cells) for alike, cells in found.items()]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Failed and unsupported cells", [block])


def _line(alike: Alike, cells: Sequence[tuple[CellName, Record]]) -> str:
    """Cells of one job that failed alike; names the rank if it is the same one everywhere."""
    job, failed, runs, status, why = alike
    reasons = {reason(record) for _, record in cells}
    count = f", {failed} of {runs} runs{' of each' if len(cells) > 1 else ''}" if runs > 1 else ""
    shown = reasons.pop() if len(reasons) == 1 else why
    return f"{name_cells([cell for cell, _ in cells])}{job}{count}: {status}: {shown}"


def _by_error(group: CellRuns) -> list[list[Record]]:
    """The failed runs of a cell, one list for each status and kind of error."""
    kinds: dict[tuple[str, str], list[Record]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            kinds.setdefault((record.status, kind), []).append(record)
    return list(kinds.values())


KEY = "surprises_all"
TITLE = "Differences: from the textbook and from defaults"


def surprises_all_section(comparison: Comparison) -> Section | None:
    """One line each, largest effect first; None where there are none."""
    rows = [
        [
            name_cells(note.cells), note.what, note.origin, note.library_note.advice,
            note.library_note.since, note.library_note.id, note.figure,
        ]
        for note in library_notes(comparison)
    ]  # fmt: skip
    if not rows:
        return None
    table = Table(key="surprises", columns=table_columns("surprises"), rows=rows)
    return Section(KEY, TITLE, [Paragraph(prose("surprises")), table])


STRONG_TEXT = prose("scaling_strong", legend=LEGEND)
WEAK_TEXT = prose("scaling_weak", legend=LEGEND)


def scaling_section(comparison: Comparison) -> Section | None:
    """None where nothing was run on several numbers of ranks."""
    strong, weak = strong_scaling(comparison), weak_scaling(comparison)
    blocks: list[Block] = []
    for curves, heading, text, table, picture in (
        (strong, "Strong scaling", STRONG_TEXT, _strong_table(strong), strong_picture(strong)),
        (weak, "Weak scaling", WEAK_TEXT, _weak_table(weak), weak_picture(weak)),
    ):
        if curves and picture is not None:
            blocks += [Heading(heading), picture, table, Paragraph(text)]
    return Section("scaling", "Scaling", blocks) if blocks else None


def _strong_table(curves: Sequence[Sequence[ScalingPoint]]) -> Table:
    """Every point once: a reference that is the base of many stands before them."""
    points = {point.group.key: point for curve in curves for point in curve}
    ordered = sorted(points.values(), key=lambda point: not point.group.is_reference)
    body = []
    for point in ordered:
        figures = [
            point.training_seconds,
            shown_ratio(point.ratio) or point.speed_up,
            point.strong_efficiency,
        ]
        body.append([*_head(point), *figures, _base(point), *_details(point)])
    return Table(key="strong_scaling", columns=table_columns("scaling_strong"), rows=body)


def _base(point: ScalingPoint) -> str:
    """'itself, 1' where the backend is its own base and has there but one layout, else by its name."""
    own = point.base.label in (point.group.label, point.group.backend)
    return f"{'itself' if own else point.base.label}, {point.base.world_size}"


def _weak_table(curves: Sequence[Sequence[ScalingPoint]]) -> Table:
    body = []
    for curve in curves:
        for point in curve:
            record = point.group.record
            weights = record.initial_weights
            line = [
                weights.parameter_count if weights else None,
                record.job.training.global_batch_size,
                point.work_ratio,
                point.step_seconds,
                shown_ratio(point.ratio, percent) or point.weak_efficiency,
            ]
            body.append([*_head(point), *line, *_details(point)])
    return Table(key="weak_scaling", columns=table_columns("scaling_weak"), rows=body)


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
        record.steps[-1].loss if record.steps else None,
        record.eval[-1].loss if record.eval else None,
        group.figures["evaluation_samples_per_second"],
    ]


UNITS = {
    "_bytes": lambda value: f"{value:,} bytes",
    "_seconds": lambda value: f"{milliseconds(value)} ms",
    "_share": percent,
}
"""By the suffix of a figure's name."""
MOST_FIGURES = 12
"""Of one finding; `compare --json` has all."""
MOST_VALUES = 3
"""Of one figure of one cell, which may differ between repeats."""
MOST_OF_A_KIND = 3
"""Sentences about one kind of finding that are not folded."""


def findings_section(comparison: Comparison) -> Section:
    """Every finding, the meaning of its kind, and its figures; or that there is none."""
    found = comparison.findings
    if not found:
        return Section("findings", "Findings", [Paragraph(no_findings(comparison))])
    merged = statements(found)
    blocks: list[Block] = []
    for role, heading in ROLES.items():
        of_role = [statement for statement in merged if statement.role == role]
        if of_role:
            blocks += [Heading(heading), *_sentences(of_role)]
    table = Table(key="finding_figures", columns=table_columns("findings"), rows=_figures(found))
    blocks += [
        Folded("Meaning of each finding, how to confirm and fix it", [_meanings(merged)]),
        Folded("Figures behind the findings", [table]),
    ]
    return Section("findings", "Findings", blocks)


def no_findings(comparison: Comparison) -> str:
    """What it means that nothing was found."""
    is_judged = any(row.judgement.parity != "unjudged" and not row.is_reference for row in comparison.rows)
    return (
        "None: every judged run trained the same job as its reference and agrees with it."
        if is_judged
        else "None, but no run could be compared with a reference."
    )


def _meanings(merged: Sequence[Statement]) -> Items:
    """The entry of the catalogue of each kind that was found, so that a report can be read by itself."""
    known = kinds()
    return Items(
        [
            (
                f"{name} ({DOCUMENT}#{name})",
                f"{known[name].title}. Cause: {known[name].cause} Confirm: {known[name].confirm} "
                f"Fix: {known[name].fix}",
            )
            for name in dict.fromkeys(statement.id for statement in merged)
        ]
    )


def _sentences(merged: Sequence[Statement]) -> list[Block]:
    """The first sentences of each kind, and the others folded."""
    of_kind: dict[str, list[tuple[str, str]]] = {}
    for statement in merged:
        of_kind.setdefault(statement.id, []).append((statement.id, statement.sentence))
    first = [line for lines in of_kind.values() for line in lines[:MOST_OF_A_KIND]]
    rest = {name: lines[MOST_OF_A_KIND:] for name, lines in of_kind.items() if lines[MOST_OF_A_KIND:]}
    if not rest:
        return [Items(first)]
    counts = ", ".join(f"{name} {len(lines)}" for name, lines in rest.items())
    folded = [line for lines in rest.values() for line in lines]
    return [Items(first), Folded(f"More of the same kinds: {counts}", [Items(folded)])]


def _figures(found: Sequence[Finding]) -> list[list[str]]:
    """Figures of the findings, causes first; cells with equal figures share a line."""
    order = list(ROLES)
    values: dict[tuple[str, CellName | Backends, str], list[str]] = {}
    for finding in sorted(found, key=lambda finding: order.index(role_of(finding.id))):
        for figure, value in _first_figures(finding):
            of_repeats = values.setdefault((finding.id, finding.about, figure), [])
            if value not in of_repeats:
                of_repeats.append(value)
    alike: dict[tuple[str, str, str], list[CellName | Backends]] = {}
    for (name, about, figure), of_repeats in values.items():
        alike.setdefault((name, figure, _joined(of_repeats)), []).append(about)
    return [[name, name_cells(abouts), figure, value] for (name, figure, value), abouts in alike.items()]


def _first_figures(finding: Finding) -> list[tuple[str, str]]:
    figures = list(flat(finding.values))
    rest = len(figures) - MOST_FIGURES
    return [*figures[:MOST_FIGURES], *([("and more", str(rest))] if rest > 0 else [])]


def _joined(values: Sequence[str]) -> str:
    rest = len(values) - MOST_VALUES
    return "; ".join([*values[:MOST_VALUES], *([f"{rest} more"] if rest > 0 else [])])


def flat(values: Any, name: str = "", unit: str = "") -> Iterator[tuple[str, str]]:
    """(figure, value with its unit) of every leaf of a finding's values that is not None."""
    if name == "exceeded":
        values = {key: f"{words(found)}, allowed {words(most)}" for key, (found, most) in values.items()}
    if isinstance(values, dict):
        for key, value in values.items():
            end = next((end for end in UNITS if str(key).endswith(end)), unit)
            here = str(key).removesuffix(end)
            here = here if "." in here else here.replace("_", " ")  # a parameter keeps its name
            yield from flat(value, f"{name}, {here}" if name else here, end)
    elif isinstance(values, list | tuple) and any(isinstance(value, dict) for value in values):
        for number, value in enumerate(values, start=1):
            yield from flat(value, f"{name} {number}", unit)
    elif values is not None:
        is_number = isinstance(values, int | float) and not isinstance(values, bool)
        yield name, UNITS[unit](values) if unit and is_number else words(values)


COLUMNS = table_columns("records")
SIDE = Column("side", "side", align="left")


def records_section(manifest: Manifest) -> Section:
    """Each record's path and digest, once, and what was left out."""
    sides = manifest.kind == "baseline"
    body = [
        [*(["before" if entry.before else "after"] if sides else []),
         Shown(entry.path, _short(entry)), entry.status, entry.sha256]
        for entry in manifest.records
    ]  # fmt: skip
    columns = (SIDE, *COLUMNS) if sides else COLUMNS
    short = sorted({_folder(entry) for entry in manifest.records if _is_named_after_its_run(entry)})
    where = f" A record named by its run alone is {' or '.join(f'{f}/RUN/{RECORD_NAME}' for f in short)}."
    blocks: list[Block] = [
        Paragraph(
            f"Written by sharding-harness {manifest.harness}, pictures by {manifest.drawing}. "
            "harness verify recomputes this file from these records and lists every line that differs. Paths "
            "are relative to the folder of this file; its manifest, which harness verify reads, "
            "holds them and the digests in full. Digests show that these are the records it was computed "
            f"from; that they are what was measured, only another run can show.{where if short else ''}"
        ),
        Table(key="records", columns=columns, rows=body),
    ]
    if manifest.left_out:
        count = len(manifest.left_out)
        what = "1 other record lies" if count == 1 else f"{count} other records lie"
        blocks.append(Paragraph(f"{what} in the same folder, not part of this report."))
    return Section("records", "Records", blocks)


def _short(entry: RecordEntry) -> str:
    return entry.run_id if _is_named_after_its_run(entry) else entry.path


def _is_named_after_its_run(entry: RecordEntry) -> bool:
    return entry.path == f"{_folder(entry)}/{entry.run_id}/{RECORD_NAME}"


def _folder(entry: RecordEntry) -> str:
    return PurePosixPath(entry.path).parent.parent.as_posix()


TITLE_READING = "How to read the numbers"


def reading_section(comparison: Comparison) -> Section:
    """Definitions and formulae of the columns."""
    unit = [f"{NO_TEXT}."] if of_no_text(comparison) else []
    turns = [BY_TURN] if any(row.record.turns for row in comparison.rows) else []
    return Section("reading", TITLE_READING, [Items([*_COMMON[:1], *unit, *_SPEEDS, *turns, *_COMMON[1:]])])


def reading_without_speeds(comparison: Comparison) -> Section:
    """The same for a report without figures of speed."""
    return Section("reading", TITLE_READING, [Items(_COMMON)])


BY_TURN = prose("records_by_turn")
_SPEEDS = prose(
    "records_speeds",
    least_for_p95=LEAST_FOR_P95,
    rounds=interval_runs(),
    level=percent(LEVEL),
    equal=percent(EQUAL),
    chance=percent(1 - LEVEL),
).split("\n")
_COMMON = prose("records_common").split("\n")
