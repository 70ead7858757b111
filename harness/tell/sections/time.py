"""Steps and phases, utilisation, evaluation, energy and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from harness.job.experiment import Price
from harness.judge import measures, speed
from harness.judge.comparison import Comparison
from harness.judge.measures import Usage, usage
from harness.judge.repeats import Repeats
from harness.judge.run import Run
from harness.judge.statistics import LEAST_FOR_P95, LEAST_STEPS, SAME_SHARE, median_known
from harness.judge.timings import DATA, PHASES, WAITING
from harness.tell.document import Block, Column, Heading, Paragraph, Section, Table
from harness.tell.formats import NOT_AVAILABLE, milliseconds, number
from harness.tell.tables import LABELS, figure_column

TEXT = (
    "Evaluations between and after timed steps; of those before, memory is measured too. Each lasts from a "
    "synchronised device to a synchronised device, as long as on its slowest rank, fetching the batches and "
    "counting the collectives included. samples/s: of the median evaluation of a run, then the median over "
    "repeats. The last batch is padded to full size on every rank; padding does not count."
)
COLUMNS = (
    *LABELS,
    Column("evaluations", "evaluations"),
    Column("samples", "samples of each"),
    Column("evaluation_seconds", "median ms", milliseconds),
    figure_column("evaluation_samples_per_second", "samples/s"),
)


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


TIME_TEXT = (
    "Figures are medians over repeats of the figure of each run; step ms of the results and of the spread is "
    "the mean timed step of a run, from which throughput follows, so it may differ. median and p95 (from "
    f"{LEAST_FOR_P95} steps on) cover the timed steps, each as long as on its slowest rank; "
    " rank spread is the slowest rank's median less the fastest's. Data is fetching the "
    "batches; forward, backward and update (clipping included) are medians on the rank where they are "
    "largest, waiting for other ranks included. On CUDA phases come from events on the stream, read after "
    "the step's one synchronisation, on the CPU from the monotonic clock. steady from: the first step, "
    "counted from 0, from which on the duration is steady, the latest of the repeats, by MSER (White 1997) "
    "on the running median of the step times, without probed, traced and cooldown steps. The timed "
    "steps should not begin before it; if that changes their mean by more than "
    f"{100 * SAME_SHARE:g} %, a finding says so. n/a: fewer than {LEAST_STEPS} such steps, or one of the "
    "repeats is not steady in its first half."
)
WAITING_TEXT = (
    "waiting: of a pipeline, for its other stages, on the rank that waits least; in none of the phases, "
    "which are passes of own stages there."
)
UTILISATION_TEXT = (
    "Model FLOPs per token: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B), N being the parameters "
    "without tables that are only looked up, L layers, H heads of size Q, T tokens a sample; padding does "
    "not count. Hardware FLOPs count padding too, and with activation checkpointing the forward pass of the "
    "blocks once more: 2 N + 4 L H Q T, N of the blocks alone. MFU and HFU are these times tokens per second "
    "over the peak of all devices together: dense, by data sheet, for the dtype of the matrix products. A "
    "measured peak is what matrix products alone reached on the same ranks before the training "
    "(measure.matmul_peak). n/a: FLOPs where the model is a mixture of experts or its shape is unknown, "
    "MFU and HFU where the harness has no data sheet of the device, as for CPUs. Empty columns are left "
    "out."
)
PROBE_TEXT = (
    "What each probe took by its own clock, per step in which it ran, on the rank where it took most: the "
    "counter of collectives; reading which weights are gathered after each module; walking live "
    "tensors at each moment; the tracer, whose time is starting, stopping and reading the profiler, "
    "between steps. The last two columns: how much longer the median probed and traced step was than a "
    "timed one, including costs that no probe's clock sees. A timed step counts, walks, hashes and copies "
    "nothing: besides training it reads the clock (on CUDA, events of the stream), sums the losses, and "
    "keeps references to batches, sample ids and losses, which are read once its clock has stopped. The "
    "first two steps of a run are probed more closely; measure.warmup_steps of 2 or more excludes them from "
    "the timed ones. Cooldown steps after the probes (measure.cooldown_steps) are not "
    "timed."
)


def teraflops(value: float | None) -> str:
    """FLOP/s as TFLOP/s (1e12)."""
    return number(None if value is None else value / 1e12)


def utilisation(value: float | None) -> str:
    """A ratio as percent with one decimal: 41.7 %."""
    return NOT_AVAILABLE if value is None else f"{value * 100:.1f} %"


TIME_COLUMNS = (
    *LABELS,
    Column("median_step_seconds", "median of a run ms", milliseconds),
    Column("p95_step_seconds", "p95 of a run ms", milliseconds, optional=True),
    Column("rank_spread_seconds", "rank spread ms", milliseconds),
    Column("data_seconds", "data ms", milliseconds),
    Column("forward_seconds", "forward ms", milliseconds),
    Column("backward_seconds", "backward ms", milliseconds),
    Column("update_seconds", "update ms", milliseconds),
    Column("waiting_seconds", "waiting ms", milliseconds, optional=True),
    Column("first_steady_step", "steady from"),
    Column("first_timed_step", "timed from"),
)
UTILISATION_COLUMNS = (
    *LABELS,
    Column("dtype", "dtype", align="left"),
    Column("model_flops_per_second", "model TFLOP/s", teraflops),
    Column("hardware_flops_per_second", "hardware TFLOP/s", teraflops),
    Column("peak_flops_per_second", "peak TFLOP/s", teraflops, optional=True),
    Column("peak_source", "peak from", align="left", optional=True),
    Column("model_utilisation", "MFU", utilisation, optional=True),
    Column("hardware_utilisation", "HFU", utilisation, optional=True),
    Column("measured_peak_flops_per_second", "measured peak TFLOP/s", teraflops, optional=True),
    Column("model_utilisation_of_measured", "MFU of measured", utilisation, optional=True),
    Column("hardware_utilisation_of_measured", "HFU of measured", utilisation, optional=True),
)
EXTRA_COLUMNS = (
    Column("probed_extra_seconds", "probed step + ms", milliseconds),
    Column("traced_extra_seconds", "traced step + ms", milliseconds),
)


def time_section(comparison: Comparison) -> Section | None:
    """Tables of medians over repeats; None where no step was timed."""
    cells = [
        Repeats(timed)
        for group in comparison.groups
        if (timed := [row for row in group.rows if measures.timed_steps(row.record)])
    ]
    if not cells:
        return None
    return Section(
        "time",
        "Time",
        [
            Table(key="time", columns=TIME_COLUMNS, rows=[_times(cell) for cell in cells]),
            Paragraph(TIME_TEXT),
            *([Paragraph(WAITING_TEXT)] if any(_waiting(cell) is not None for cell in cells) else []),
            Heading("Utilisation"),
            Table(
                key="utilisation",
                columns=UTILISATION_COLUMNS,
                rows=[_utilisations(cell) for cell in cells],
            ),
            Paragraph(UTILISATION_TEXT),
            *evaluation_blocks(comparison),
            Heading("Cost of the probes"),
            _probe_table(cells),
            Paragraph(PROBE_TEXT),
        ],
    )


def _times(cell: Repeats) -> list[object]:
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


def _waiting(cell: Repeats) -> float | None:
    return _middle(cell.runs, lambda run: run.least_median(WAITING))


def _utilisations(cell: Repeats) -> list[object]:
    model = [speed.model_flops_per_second(run) for run in cell.runs]
    hardware = [speed.hardware_flops_per_second(run) for run in cell.runs]
    sheets = [speed.sheet_peak(run.record) for run in cell.runs]
    reached = [speed.measured_peak(run.record) for run in cell.runs]
    sheet, measured = sheets[0], reached[0]
    return [
        *cell.cell,
        speed.compute_dtype(cell.record),
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


def _probe_table(cells: Sequence[Repeats]) -> Table:
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
    return Table(key="probe_cost", columns=[*LABELS, *probes, *EXTRA_COLUMNS], rows=body)


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


def _line(group: Repeats) -> list[Any] | None:
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
