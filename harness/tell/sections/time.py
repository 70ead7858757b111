"""Where time goes: steps and phases, utilisation, evaluation, energy and cost, overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from harness.backends.registry import strategy_of
from harness.job.experiment import Price
from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.quantities import DATA, PHASES, WAITING, Run, Usage, median_step, usage
from harness.judge.rows import CellRuns, job_marks
from harness.judge.statistics import LEAST_FOR_P95, LEAST_STEPS, SAME_SHARE, median_known
from harness.judge.wording import CellName, name_cells
from harness.record import OverlapPart, Record
from harness.tell.document import Block, Column, Folded, Heading, Items, Paragraph, Section, Table
from harness.tell.formats import milliseconds, number, percent
from harness.tell.tables import LABELS, prose, row_of, table_columns

TEXT = prose("evaluation")
COLUMNS = table_columns("evaluation")


def evaluation_blocks(comparison: Comparison) -> list[Block]:
    """A line for each cell that was evaluated while its steps were timed; [] without any."""
    body = []
    for group in comparison.groups:
        timed = [pair for row in group.rows for pair in quantities.timed_evaluations(row.record)]
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
        if (timed := [row for row in group.rows if quantities.timed_steps(row.record)])
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
        _middle(runs, quantities.p95_step_seconds),
        _middle(runs, quantities.rank_spread_seconds),
        _middle(runs, _part(DATA)),
        *(_middle(runs, _part(phase)) for phase in PHASES),
        _waiting(cell),
        max(steady) if len(steady) == len(runs) else None,
        quantities.timed_steps(cell.record)[0].step,
    ]


def _waiting(cell: CellRuns) -> float | None:
    return _middle(cell.runs, lambda run: run.least_median(WAITING))


def _utilisations(cell: CellRuns) -> list[object]:
    model = [quantities.model_flops_per_second(run) for run in cell.runs]
    hardware = [quantities.hardware_flops_per_second(run) for run in cell.runs]
    sheets = [quantities.sheet_peak(run.record) for run in cell.runs]
    reached = [quantities.measured_peak(run.record) for run in cell.runs]
    sheet, measured = sheets[0], reached[0]
    return [
        *cell.cell,
        quantities.peak_dtype(cell.record),
        median_known(model),
        median_known(hardware),
        sheet.flops_per_second if sheet else None,
        sheet.source if sheet else None,
        median_known(map(quantities.share_of, model, sheets)),
        median_known(map(quantities.share_of, hardware, sheets)),
        measured.flops_per_second if measured else None,
        median_known(map(quantities.share_of, model, reached)),
        median_known(map(quantities.share_of, hardware, reached)),
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


MOSTLY, PARTLY = 0.8, 0.2
"""Shares of hidden communication from which on the words change."""
PREFETCH_SETTINGS = ("forward_prefetch", "backward_prefetch", "limit_all_gathers")
OFF = {"forward_prefetch": (False, 0), "backward_prefetch": ("none", 0)}


def overlap_words(share: float, record: Record) -> str:
    """One or two sentences; `share` of the communication is hidden.

    Prefetch is mentioned if the backend gathers weights and can do so ahead.
    """
    text = f"{percent(share)} of the communication is hidden: "
    if share >= MOSTLY:
        text += "it overlaps with computation."
    elif share >= PARTLY:
        text += "overlap works partly."
    else:
        text += "ranks wait for it."
    about_prefetch = _prefetch(share, record)
    return f"{text} {about_prefetch}" if about_prefetch else text


def _prefetch(share: float, record: Record) -> str | None:
    """A sentence about prefetch; None if the backend gathers nothing ahead."""
    strategy = strategy_of(record.backend.name)
    effective = record.backend.effective
    details = effective.details if effective else {}
    if strategy is None:
        return None
    if strategy.zero_stage == 3:
        ahead = effective.prefetch if effective else None
        if ahead in (None, "none") and record.world.preset == "like-for-like":
            return "Prefetch is off: the preset like-for-like sets max_live_parameters to 0."
        if ahead is None:
            return None
        return "Prefetch is off." if ahead == "none" else f"{_judge(share)} (in force: up to {ahead} ahead)."
    if not strategy.of_family.overlaps_on_streams:
        return None
    if record.world.device == "cpu":
        return (
            "What overlap or prefetch could hide cannot be measured on this machine: FSDP overlaps on "
            f"streams of a device, and the CPU has none{_settings(details)}."
        )
    if strategy.sharding == "none":
        return None
    if all(details.get(setting) in values for setting, values in OFF.items()):
        return f"Prefetch is off{_settings(details)}."
    return f"{_judge(share)}{_settings(details)}."


def _judge(share: float) -> str:
    if share >= MOSTLY:
        return "Prefetch works"
    return "Prefetch works partly" if share >= PARTLY else "Prefetch does not help"


def _settings(details: dict[str, Any]) -> str:
    """Prefetch settings in force, as the backend read them back."""
    known = [f"{name} {details[name]}" for name in PREFETCH_SETTINGS if name in details]
    return f" (in force: {', '.join(known)})" if known else ""


TITLE = "Overlap of computation and communication"
LONGEST_WAITS = 3
OVERLAP = table_columns("overlap")

TEXTS = {"cpu": prose("overlap_cpu"), "cuda": prose("overlap_cuda")}


def overlap_section(comparison: Comparison) -> Section | None:
    """One line per backend and rank, its median traced step of all repeats; None where none was traced."""
    groups = comparison.groups
    body = [line for group in groups for line in _lines(group)]
    missing = _missing(groups)
    if not body:
        return Section("overlap", TITLE, [missing]) if missing else None
    traced = [row.record for row in comparison.rows if any(rank.overlap for rank in row.record.ranks)]
    texts = [TEXTS[device] for device in dict.fromkeys(record.world.device for record in traced)]
    blocks: list[Block] = [Paragraph(text) for text in [*texts, prose("overlap_sum")]]
    marks = job_marks(groups)
    by_sentence: dict[tuple[str, str], list[CellName]] = {}
    for group in groups:
        if (sentence := overlap_sentence(group)) is not None:
            by_sentence.setdefault((marks[group.record.job_id], sentence), []).append(group.cell)
    if missing:
        blocks.append(missing)
    if by_sentence:
        items = [f"{name_cells(cells)}{job}: {sentence}" for (job, sentence), cells in by_sentence.items()]
        blocks.append(Items(items))
    blocks.append(Folded("Each rank", [Table(key="overlap", columns=OVERLAP, rows=body)]))
    waits = [line for group in groups if group.world_size > 1 for line in _waits(group)]
    if waits:
        table = Table(key="longest_waits", columns=table_columns("overlap_wait"), rows=waits)
        title = (
            f"The {LONGEST_WAITS} longest waits of each cell, over all its repeats, ranks and traced steps"
        )
        blocks.append(Folded(title, [table]))
    traces = [
        f"{row.record.run_id}/{artifact.path}"
        for row in comparison.rows
        for artifact in row.record.artifacts
        if artifact.kind == "trace"
    ]
    if traces:
        text = "Traces in the folder of the runs; open them at ui.perfetto.dev or in chrome://tracing."
        blocks.append(Folded("Traces", [Paragraph(text), Items(traces)]))
    return Section("overlap", TITLE, blocks)


def _missing(groups: Sequence[CellRuns]) -> Items | None:
    """Why a traced cell has no line."""
    cells: dict[str, list[CellName]] = {}
    for group in groups:
        for reason in {rank.overlap_missing for row in group.rows for rank in row.record.ranks} - {None}:
            cells.setdefault(str(reason), []).append(group.cell)
    items = [f"{name_cells(of_reason)}: n/a: {reason}." for reason, of_reason in cells.items()]
    return Items(items) if items else None


def hidden_share(parts: Sequence[OverlapPart]) -> float | None:
    """Share of the communication during which something computes; None without communication."""
    communication = sum(part.communication_seconds for part in parts)
    exposed = sum(part.exposed_seconds for part in parts)
    return 1 - exposed / communication if communication else None


def overlap_sentence(group: CellRuns) -> str | None:
    """How much of the communication is hidden, in words; None without communication with other ranks."""
    share = hidden_share([part for row in group.rows for rank in row.record.ranks for part in rank.overlap])
    return None if share is None or group.world_size == 1 else overlap_words(share, group.record)


def _lines(group: CellRuns) -> list[list[Any]]:
    parts: dict[int, list[OverlapPart]] = {}
    for row in group.rows:
        for rank in row.record.ranks:
            parts.setdefault(rank.rank, []).extend(rank.overlap)
    return [
        [*group.cell, rank, *_overlap_times(of_rank, alone=group.world_size == 1)]
        for rank, of_rank in parts.items()
        if of_rank
    ]


def _overlap_times(parts: Sequence[OverlapPart], *, alone: bool) -> list[Any]:
    """Of the median step; a single rank waits for nobody, so nothing can be hidden."""
    middle = median_step(parts)
    return [*row_of(OVERLAP[3:-1], middle), None if alone else hidden_share([middle])]


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
