"""Steps and phases, utilisation, evaluation, energy and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from harness.job.experiment import Price
from harness.judge import speed
from harness.judge.comparison import Comparison
from harness.judge.quantities import measures
from harness.judge.quantities.measures import Usage, usage
from harness.judge.quantities.timings import DATA, PHASES, WAITING
from harness.judge.repeats import CellRuns
from harness.judge.run import Run
from harness.judge.statistics import LEAST_FOR_P95, LEAST_STEPS, SAME_SHARE, median_known
from harness.tell.document import Block, Column, Heading, Paragraph, Section, Table
from harness.tell.formats import milliseconds, number
from harness.tell.tables import LABELS, prose, table_columns

TEXT = prose("evaluation")
COLUMNS = table_columns("evaluation")


def evaluation_blocks(comparison: Comparison) -> list[Block]:
    """A line for each cell that was evaluated while its steps were timed; [] without any."""
    body = []
    for group in comparison.groups:
        timed = [pair for row in group.rows for pair in measures.timed_evaluations(row.record)]
        if timed:
            samples, seconds = timed[0][0], median(seconds for _, seconds in timed)
            rate = group.figures["evaluation_samples_per_second"]
            body.append([*group.cell, len(timed), samples, seconds, rate])
    if not body:
        return []
    return [Heading("Evaluation"), Table(key="evaluation", columns=COLUMNS, rows=body), Paragraph(TEXT)]


TIME_TEXT = prose(
    "time", least_for_p95=LEAST_FOR_P95, same_share=f"{100 * SAME_SHARE:g}", least_steps=LEAST_STEPS
)
WAITING_TEXT = prose("time_waiting")


def time_section(comparison: Comparison) -> Section | None:
    """Tables of medians over repeats; None where no step was timed."""
    cells = [
        CellRuns(timed)
        for group in comparison.groups
        if (timed := [row for row in group.rows if measures.timed_steps(row.record)])
    ]
    if not cells:
        return None
    return Section(
        "time",
        "Time",
        [
            Table(key="time", columns=table_columns("time"), rows=[_times(cell) for cell in cells]),
            Paragraph(TIME_TEXT),
            *([Paragraph(WAITING_TEXT)] if any(_waiting(cell) is not None for cell in cells) else []),
            Heading("Utilisation"),
            Table(
                key="utilisation",
                columns=table_columns("time_utilisation"),
                rows=[_utilisations(cell) for cell in cells],
            ),
            Paragraph(prose("time_utilisation")),
            *evaluation_blocks(comparison),
            Heading("Cost of the probes"),
            _probe_table(cells),
            Paragraph(prose("time_probe")),
        ],
    )


def _times(cell: CellRuns) -> list[object]:
    runs = cell.runs
    steady = [run.steady_from for run in runs if run.steady_from is not None]
    return [
        *cell.cell,
        _middle(runs, lambda run: run.median_step_seconds),
        _middle(runs, speed.p95_step_seconds),
        _middle(runs, speed.rank_spread_seconds),
        _middle(runs, _part(DATA)),
        *(_middle(runs, _part(phase)) for phase in PHASES),
        _waiting(cell),
        max(steady) if len(steady) == len(runs) else None,
        measures.timed_steps(cell.record)[0].step,
    ]


def _waiting(cell: CellRuns) -> float | None:
    return _middle(cell.runs, lambda run: run.least_median(WAITING))


def _utilisations(cell: CellRuns) -> list[object]:
    model = [speed.model_flops_per_second(run) for run in cell.runs]
    hardware = [speed.hardware_flops_per_second(run) for run in cell.runs]
    sheets = [speed.sheet_peak(run.record) for run in cell.runs]
    reached = [speed.measured_peak(run.record) for run in cell.runs]
    sheet, measured = sheets[0], reached[0]
    return [
        *cell.cell,
        speed.peak_dtype(cell.record),
        median_known(model),
        median_known(hardware),
        sheet.flops_per_second if sheet else None,
        sheet.source if sheet else None,
        median_known(map(speed.share_of, model, sheets)),
        median_known(map(speed.share_of, hardware, sheets)),
        measured.flops_per_second if measured else None,
        median_known(map(speed.share_of, model, reached)),
        median_known(map(speed.share_of, hardware, reached)),
    ]


def _probe_table(cells: Sequence[CellRuns]) -> Table:
    """A column for each probe that ran in any of the cells."""
    ranks = [rank for cell in cells for run in cell.runs for rank in run.record.ranks]
    names = sorted({name for rank in ranks for name in rank.probe_seconds})
    probes = [Column(f"{name}_seconds", f"{name.replace('_', ' ')} ms", milliseconds) for name in names]
    body = [
        [
            *cell.cell,
            *(_middle(cell.runs, _probe(name)) for name in names),
            _middle(cell.runs, lambda run: extra_seconds(run, "probed")),
            _middle(cell.runs, lambda run: extra_seconds(run, "traced")),
        ]
        for cell in cells
    ]
    return Table(key="probe_cost", columns=[*LABELS, *probes, *table_columns("time_extra")], rows=body)


def extra_seconds(run: Run, window: str) -> float | None:
    """Median step of a window less the median timed step; None where either is missing."""
    looked_at = [step.seconds for step in run.record.steps if step.window == window]
    timed = run.median_step_seconds
    return median(looked_at) - timed if looked_at and timed is not None else None


def _part(part: str) -> Callable[[Run], float | None]:
    return lambda run: run.largest_median(part)


def _probe(name: str) -> Callable[[Run], float | None]:
    """Seconds per step on the rank where the probe took most; None where it did not run."""
    return lambda run: max(
        (rank.probe_seconds[name] for rank in run.record.ranks if name in rank.probe_seconds), default=None
    )


def _middle(runs: Sequence[Run], measure: Callable[[Run], float | None]) -> float | None:
    return median_known(map(measure, runs))


FIGURES: tuple[tuple[Column, Callable[[Usage], float | None]], ...] = (
    (Column("device_watts", "GPUs W", number, optional=True), lambda found: found.device_watts),
    (Column("host_watts", "hosts W", number, optional=True), lambda found: found.host_watts),
    (
        Column("kilowatt_hours_per_billion_tokens", "kWh/1e9 tokens", number, optional=True),
        lambda found: found.kilowatt_hours,
    ),
    (
        Column("gpu_hours_per_billion_tokens", "GPU-hours/1e9 tokens", number, optional=True),
        lambda found: found.gpu_hours,
    ),
    (Column("cost_per_billion_tokens", "cost/1e9 tokens", number, optional=True), lambda found: found.cost),
)


def energy_section(comparison: Comparison) -> Section | None:
    """None where no energy is known and no cost can be stated."""
    body = [[*group.cell, *line] for group in comparison.groups if (line := _line(group)) is not None]
    if not body:
        return None
    table = Table(key="energy", columns=[*LABELS, *(column for column, _ in FIGURES)], rows=body)
    blocks: list[Block] = [table, Paragraph(_text(comparison))]
    return Section("energy", "Energy and cost", blocks)


def _line(group: CellRuns) -> list[Any] | None:
    """Medians over the repeats; None where there is neither energy nor cost."""
    found = [of_run for row in group.rows if (of_run := usage(row.record)) is not None]
    if all(one.kilowatt_hours is None and one.cost is None for one in found):
        return None
    return [_median_of_sums([read(one) for one in found]) for _, read in FIGURES]


def _median_of_sums(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) and known else None


def _text(comparison: Comparison) -> str:
    sentences = [
        "Medians over repeats. Power is energy over time from the first timed step to the end of the "
        "training; GPUs by the driver's counter (NVML), hosts by RAPL: packages and DRAM of all machines, "
        "whichever program used them. Per 1e9 tokens: at the tokens/s of the timed steps."
    ]
    prices = {row.record.price_per_gpu_hour for row in comparison.rows} - {None}
    if prices:
        listed = " or ".join(sorted(str(price) for price in prices if isinstance(price, Price)))
        sentences.append(f"Cost: GPU-hours at {listed} per hour of one GPU, as given.")
    if unknown := _unknown(comparison):
        sentences.append(f"n/a: {'; '.join(unknown)}.")
    return " ".join(sentences)


def _unknown(comparison: Comparison) -> list[str]:
    """Reasons, each once."""
    parts = [part for row in comparison.rows for rank in row.record.ranks if (part := rank.energy)]
    return sorted({why for part in parts for why in (part.device_unknown, part.host_unknown) if why})
