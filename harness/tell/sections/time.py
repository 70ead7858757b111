"""Where time goes: steps and phases, utilisation, evaluation, energy and cost, overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from statistics import median
from typing import Any

from harness.job.experiment import Price
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.quantities import DATA, PHASES, WAITING, Run, median_step, usage
from harness.judge.rows import CellRuns, job_marks
from harness.judge.statistics import LEAST_FOR_P95, LEAST_STEPS, SAME_SHARE, median_known
from harness.judge.wording import name_cells
from harness.nested import grouped
from harness.record import OverlapPart
from harness.tell.document import Column, Folded, Heading, Items, Section, Table
from harness.tell.formats import milliseconds, percent
from harness.tell.tables import LABELS, blocks_of, prose, row_of, section, table, table_columns


def time_section(comparison: Comparison) -> Section | None:
    """Tables of medians over repeats; None where no step was timed."""
    cells = [
        CellRuns(timed)
        for group in comparison.groups
        if (timed := [row for row in group.rows if quantities.timed_steps(row.record)])
    ]
    if not cells:
        return None
    shares = {"least_for_p95": LEAST_FOR_P95, "same_share": f"{100 * SAME_SHARE:g}"}
    evaluations = table("evaluation", _evaluations(comparison))
    return section(
        "time", "Time",
        table("time", [_times(cell) for cell in cells]),
        prose("time", least_steps=LEAST_STEPS, **shares),
        prose("time_waiting") if any(_waiting(cell) is not None for cell in cells) else None,
        Heading("Utilisation"),
        table("utilisation", [_utilisations(cell) for cell in cells], "time_utilisation"),
        prose("time_utilisation"),
        *(blocks_of(Heading("Evaluation"), evaluations, prose("evaluation")) if evaluations else []),
        Heading("Cost of the probes"),
        _probe_table(cells),
        prose("time_probe"),
    )  # fmt: skip


def _evaluations(comparison: Comparison) -> list[list[Any]]:
    """A line for each cell that was evaluated while its steps were timed."""
    body = []
    for group in comparison.groups:
        timed = [pair for row in group.rows for pair in quantities.timed_evaluations(row.record)]
        if timed:
            middle, rate = median(seconds for _, seconds in timed), "evaluation_samples_per_second"
            body.append([*group.cell, len(timed), timed[0][0], middle, group.figures[rate]])
    return body


def _times(cell: CellRuns) -> list[object]:
    runs = cell.runs
    steady = [run.steady_from for run in runs if run.steady_from is not None]
    measures: list[Callable[[Run], float | None]] = [
        lambda run: run.median_step_seconds, quantities.p95_step_seconds, quantities.rank_spread_seconds,
        *(methodcaller("largest_median", part) for part in (DATA, *PHASES)),
    ]  # fmt: skip
    return [
        *cell.cell,
        *(_middle(runs, measure) for measure in measures),
        _waiting(cell),
        max(steady) if len(steady) == len(runs) else None,
        quantities.timed_steps(cell.record)[0].step,
    ]


def _waiting(cell: CellRuns) -> float | None:
    return _middle(cell.runs, lambda run: min(run.rank_medians(WAITING), default=None))


def _utilisations(cell: CellRuns) -> list[object]:
    rates = [
        [rate(run) for run in cell.runs]
        for rate in (quantities.model_flops_per_second, quantities.hardware_flops_per_second)
    ]
    sheets = [quantities.sheet_rate(run.record) for run in cell.runs]
    reached = [quantities.measured_rate(run.record) for run in cell.runs]
    sheet, measured = sheets[0], reached[0]
    return [
        *cell.cell,
        quantities.peak_dtype(cell.record),
        *map(median_known, rates),
        sheet.flops_per_second if sheet else None,
        sheet.source if sheet else None,
        *(median_known(map(quantities.share_of, rate, sheets)) for rate in rates),
        measured.flops_per_second if measured else None,
        *(median_known(map(quantities.share_of, rate, reached)) for rate in rates),
    ]


def _probe_table(cells: Sequence[CellRuns]) -> Table:
    """A column for each probe that ran: seconds per step on the rank where it took most."""
    ranks = [rank for cell in cells for run in cell.runs for rank in run.record.ranks]
    names = sorted({name for rank in ranks for name in rank.probe_seconds})

    def most(run: Run, name: str) -> float | None:
        return max((r.probe_seconds[name] for r in run.record.ranks if name in r.probe_seconds), default=None)

    probes = [Column(f"{name}_seconds", f"{name.replace('_', ' ')} ms", milliseconds) for name in names]
    body = [
        [
            *cell.cell,
            *(_middle(cell.runs, partial(most, name=name)) for name in names),
            *(_middle(cell.runs, partial(extra_seconds, window=window)) for window in ("probed", "traced")),
        ]
        for cell in cells
    ]
    return Table(key="probe_cost", columns=[*LABELS, *probes, *table_columns("time_extra")], rows=body)


def extra_seconds(run: Run, window: str) -> float | None:
    """Median step of a window less the median timed step; None where either is missing."""
    looked_at = [step.seconds for step in run.record.steps if step.window == window]
    timed = run.median_step_seconds
    return median(looked_at) - timed if looked_at and timed is not None else None


def _middle(runs: Sequence[Run], measure: Callable[[Run], float | None]) -> float | None:
    return median_known(map(measure, runs))


def used(group: CellRuns, name: str) -> float | None:
    """Median of a figure of `usage` over the runs that were timed; None where one of them lacks it."""
    found = [of_run[name] for row in group.rows if (of_run := usage(row.record))]
    return median(found) if found and None not in found else None


def energy_section(comparison: Comparison) -> Section | None:
    """Medians over the repeats; None where no energy is known and no cost can be stated."""
    columns, body = table_columns("energy"), []
    names = [column.key.removesuffix("_per_billion_tokens") for column in columns]
    for group in comparison.groups:
        if used(group, "kilowatt_hours") is not None or used(group, "cost") is not None:
            body.append([*group.cell, *(used(group, name) for name in names)])
    texts = [prose("energy")]
    prices = {row.record.price_per_gpu_hour for row in comparison.rows} - {None}
    if prices:
        listed = " or ".join(sorted(str(price) for price in prices if isinstance(price, Price)))
        texts.append(f"Cost: GPU-hours at {listed} per hour of one GPU, as given.")
    parts = [part for row in comparison.rows for rank in row.record.ranks if (part := rank.energy)]
    unknown = sorted({part.device_unknown for part in parts if part.device_unknown})
    texts += [f"n/a: {'; '.join(unknown)}."] if unknown else []
    return section("energy", "Energy and cost", table("energy", body, [*LABELS, *columns]), " ".join(texts))


MOSTLY, PARTLY = 0.8, 0.2
"""Shares of hidden communication from which on the words change."""
LONGEST_WAITS = 3
OVERLAP = table_columns("overlap")


def overlap_section(comparison: Comparison) -> Section | None:
    """One line per backend and rank, its median traced step of all repeats; None where none was traced."""
    groups = comparison.groups
    title = "Overlap of computation and communication"
    # Why a traced cell has no line.
    unknown = grouped(
        (str(reason), group.cell)
        for group in groups
        for reason in {rank.overlap_missing for row in group.rows for rank in row.record.ranks} - {None}
    )
    reasons = [f"{name_cells(cells)}: n/a: {reason}." for reason, cells in unknown.items()]
    missing = Items(reasons) if reasons else None
    body = [line for group in groups for line in _lines(group)]
    if not body:
        return section("overlap", title, missing)
    traced = [row.record for row in comparison.rows if any(rank.overlap for rank in row.record.ranks)]
    marks = job_marks(groups)
    by_sentence = grouped(
        ((marks[group.record.job_id], sentence), group.cell)
        for group in groups
        if (sentence := overlap_sentence(group)) is not None
    )
    items = [f"{name_cells(cells)}{job}: {sentence}" for (job, sentence), cells in by_sentence.items()]
    waits = [line for group in groups if group.world_size > 1 for line in _waits(group)]
    of_waits = table("longest_waits", waits, "overlap_wait")
    traces = [
        f"{row.record.run_id}/{artifact.path}"
        for row in comparison.rows
        for artifact in row.record.artifacts
        if artifact.kind == "trace"
    ]
    return section(
        "overlap", title,
        *(prose(f"overlap_{device}") for device in dict.fromkeys(r.world.device for r in traced)),
        prose("overlap_sum"),
        missing,
        Items(items) if items else None,
        Folded("Each rank", [Table(key="overlap", columns=OVERLAP, rows=body)]),
        Folded(prose("overlap_waits", number=LONGEST_WAITS), [of_waits]) if of_waits else None,
        Folded("Traces", blocks_of(prose("overlap_traces"), Items(traces))) if traces else None,
    )  # fmt: skip


def hidden_share(parts: Sequence[OverlapPart]) -> float | None:
    """Share of the communication during which something computes; None without communication."""
    communication = sum(part.communication_seconds for part in parts)
    exposed = sum(part.exposed_seconds for part in parts)
    return 1 - exposed / communication if communication else None


def overlap_sentence(group: CellRuns) -> str | None:
    """How much of the communication is hidden, in words; None without communication with other ranks."""
    share = hidden_share([part for row in group.rows for rank in row.record.ranks for part in rank.overlap])
    if share is None or group.world_size == 1:
        return None
    how = prose("overlap_" + ("mostly" if share >= MOSTLY else "partly" if share >= PARTLY else "hardly"))
    return f"{percent(share)} of the communication is hidden: {how}"


def _lines(group: CellRuns) -> Iterator[list[Any]]:
    """Each rank's median step; a single rank waits for nobody, so nothing can be hidden."""
    parts: dict[int, list[OverlapPart]] = {}
    for row in group.rows:
        for rank in row.record.ranks:
            parts.setdefault(rank.rank, []).extend(rank.overlap)
    for number, of_rank in parts.items():
        if of_rank:
            step = median_step(of_rank)
            hidden = hidden_share([step]) if group.world_size > 1 else None
            yield [*group.cell, number, *row_of(OVERLAP[3:-1], step), hidden]


def _waits(group: CellRuns) -> list[list[Any]]:
    """The longest waits of a cell over its repeats, ranks and traced steps."""
    waits: list[list[Any]] = [
        [row.record.repeat, rank.rank, part.step, wait.phase, wait.name, wait.seconds]
        for row in group.rows
        for rank in row.record.ranks
        for part in rank.overlap
        for wait in part.waits
    ]
    waits.sort(key=lambda wait: -wait[-1])
    return [[*group.cell, *wait] for wait in waits[:LONGEST_WAITS]]
