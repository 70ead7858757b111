"""Speed that was not measured, cannot be right, or is not the backend's: warm-up, neighbours, data, power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.judge import quantities, speed
from harness.judge.findings.finding import Finding, labels, of_cells
from harness.judge.quantities import DATA, WHOLE, Run, is_beyond_noise, mean_watts
from harness.judge.rows import CellRuns, JudgedRun, Runs
from harness.judge.run_conditions import node_threads, shares_cores
from harness.judge.statistics import LEAST_STEPS, SAME_SHARE, uninstrumented_steps
from harness.judge.wording import CellName, counted, numbered
from harness.record import OUTSIDE, EnergyPart, RankPart, Record


def find_too_short(runs: Runs) -> list[Finding]:
    """Successful runs that were too short for a timed step, in one finding; none is timed on a CUDA stub."""
    ran = [r for r in runs.rows if r.record.status == "ok" and not r.record.on_stub]
    short = [r for r in ran if not quantities.timed_steps(r.record)]
    if not short:
        return []
    steps = max(len(row.record.steps) for row in short)
    text = (
        "no step was timed: measure.warmup_steps, measure.probed_steps and measure.traced_steps use up all "
        f"{steps}"
    )
    if not steps:
        text = "no step was seen: no torch optimizer stepped after a call of backward()"
    return [
        Finding(
            id="nothing-timed",
            about=labels(short),
            text=text,
            values={"steps": steps},
        )
    ]


MEASURED_MARGIN = 1.25
"""A measured peak holds for one second; at another clock and load the machine may be faster."""
CLOCK_SHARE = 0.01
CLOCK_SECONDS = 1e-4
"""The clocks of host and device may differ by so much of a step, and by so much at its borders."""


def find_impossible(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run."""
    found = []
    for row in runs.rows:
        found += _beyond_peak(row)
        found += _shorter_than_parts(row)
        found += _outside_clock(row)
    return found


LATE = (OUTSIDE, "data", "forward")
"""What the loop does behind a step's update."""


def _outside_clock(row: JudgedRun) -> list[Finding]:
    """Updates that were made after the time of their step was taken."""
    made = row.record.observed.updates_by_phase if row.record.observed is not None else {}
    late = sum(count for phase, count in made.items() if phase in LATE)
    if not late:
        return []
    ahead = late == made.get("forward")
    where = "in the next forward pass" if ahead else "between two steps, where no clock runs"
    return [
        Finding(
            id="work-outside-clock",
            about=row.cell,
            text=f"updates of the optimizer ran {where} ({late} of {sum(made.values())} that were looked "
            "at): a step's time lacks its update",
            values={"updates_by_phase": made},
        )
    ]


def _beyond_peak(row: JudgedRun) -> list[Finding]:
    record = row.record
    for peak, margin in ((speed.sheet_peak(record), 1.0), (speed.measured_peak(record), MEASURED_MARGIN)):
        achieved = speed.least_flops_per_second(row.run) if peak is not None else None
        if peak is not None and achieved is not None and achieved > margin * peak.flops_per_second:
            return [
                Finding(
                    id="faster-than-possible",
                    about=row.cell,
                    text=f"needs {achieved / 1e12:.3g} TFLOP/s but the devices reach "
                    f"{peak.flops_per_second / 1e12:.3g} ({peak.source}): timing is not synchronised",
                    values={
                        "least_flops_per_second": achieved,
                        "peak_flops_per_second": peak.flops_per_second,
                        "peak_source": peak.source,
                    },
                )
            ]
    return []


def _shorter_than_parts(row: JudgedRun) -> list[Finding]:
    """The timed step that is shortest compared with its phases."""
    record, timed = row.record, row.run.timings
    if timed is None or timed.phases is None:
        return []
    # On CUDA the host fetches the next batch while the device still works on the last.
    parts = timed.phases + timed.data if record.world.device == "cpu" else timed.phases
    missing = parts - timed.steps * (1 + CLOCK_SHARE) - CLOCK_SECONDS
    rank, step = np.unravel_index(missing.argmax(), missing.shape)
    if missing[rank, step] <= 0:
        return []
    values = {
        "rank": record.ranks[rank].rank,
        "step": record.steps[quantities.first_timed(record) + int(step)].step,
        "step_seconds": float(timed.steps[rank, step]),
        "phase_seconds": float(parts[rank, step]),
    }
    return [
        Finding(
            id="inconsistent-timing",
            about=row.cell,
            text=f"step {values['step']:g} of rank {values['rank']:g} took "
            f"{values['step_seconds']:.4g} s, its phases {values['phase_seconds']:.4g} s: the step's timer "
            "stopped too early",
            values=values,
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Early:
    """Timed steps of one run that differ from those after them by more than the machine explains."""

    first_timed: int
    first_steady: int | None
    """None: the step times are not steady within the first half of the run."""
    factor: float
    """Between the mean of early and later steps, without what the machine took; at least 1."""


def find_warmup(runs: Runs) -> list[Finding]:
    """One finding per cell whose timed steps begin before its steady state in all runs."""
    return [finding for group in runs.groups if (finding := _unsteady(group)) is not None]


def _unsteady(group: CellRuns) -> Finding | None:
    judged = [run for run in group.runs if _is_long_enough(run)]
    early = [found for run in judged if (found := early_steps(run)) is not None]
    if len(early) < len(judged) or not is_beyond_noise([one.factor for one in early]):
        return None
    steady = [one.first_steady for one in early if one.first_steady is not None]
    first_steady = max(steady) if len(steady) == len(early) else None
    steady_when = (
        "do not become steady within the first half of the run"
        if first_steady is None
        else f"are steady from step {first_steady}"
    )
    return Finding(
        id="warmup-too-short",
        about=group.cell,
        text=f"timing begins at step {early[0].first_timed}, steps {steady_when}",
        values={
            "first_timed_step": early[0].first_timed,
            "first_steady_step": first_steady,
            "warmup_steps": _warmup(group.record),
        },
    )


def _is_long_enough(run: Run) -> bool:
    return bool(run.step_seconds) and len(uninstrumented_steps(run.record)[0]) >= LEAST_STEPS


def early_steps(run: Run) -> Early | None:
    """What a run shows; None: nothing, or it is not known what the machine took from it."""
    timed = quantities.timed_steps(run.record)
    numbers = [step.step for step in timed]
    first = run.steady_from
    early = len(timed) // 2 if first is None else sum(number < first for number in numbers)
    if run.disturbance is None or not 0 < early < len(timed):
        return None
    excess, level = _excess(run.step_seconds, early, either=first is None)
    own = excess - run.disturbance.lost_seconds
    if own <= SAME_SHARE * level * len(timed):
        return None
    return Early(first_timed=numbers[0], first_steady=first, factor=1 + own / early / level)


def _excess(seconds: Sequence[float], early: int, *, either: bool) -> tuple[float, float]:
    """By how much the early steps exceed the level of the others, in total; and that level.

    `either`: whichever of the two are longer, since the steps have no steady level.
    """
    first, rest = fmean(seconds[:early]), fmean(seconds[early:])
    level = min(first, rest) if either else rest
    return early * (max(first, rest) - level if either else first - level), level


def _warmup(record: Record) -> int:
    return record.windows.warmup if record.windows else 0


LEAST_CORES = 0.2
"""With so much of its core taken a rank is 1.25 times slower: what counts as a slow rank."""


def find_machine(runs: Runs) -> list[Finding]:
    """One finding per run beside which other work used processors, or that had too few cores."""
    left = max((node_threads(row.record) for row in runs.rows), default=0)
    found = [_busy(row, left) for row in runs.rows]
    found += [judge(row) for judge in (_shared, _unbound) for row in runs.rows]
    return [finding for finding in found if finding is not None]


def _shared(row: JudgedRun) -> Finding | None:
    record = row.record
    if not shares_cores(record) or not quantities.timed_steps(record):
        return None
    cores, threads = record.environment.cores or 0, node_threads(record)
    return Finding(
        id="cores-shared",
        about=row.cell,
        text=f"{threads} threads per node share {counted(cores, 'core')}: "
        "speed and scaling say little about the strategies",
        values={"threads": threads, "cores": cores},
    )


def _unbound(row: JudgedRun) -> Finding | None:
    record = row.record
    if record.on_stub or not quantities.timed_steps(record):
        return None
    threads = record.world.threads_per_rank if record.world.device == "cpu" else 1
    places = {rank.rank: rank.placement for rank in record.ranks if rank.placement is not None}
    far = [r for r, p in places.items() if p.numa_nodes and p.device_numa_node not in (None, *p.numa_nodes)]
    loose = [
        r for r, p in places.items()
        if len(p.numa_nodes) > 1 and p.processor_count // len(p.numa_nodes) >= threads
    ]  # fmt: skip
    if not far and not loose:
        return None
    worst = far or loose
    nodes = sorted({node for rank in worst for node in places[rank].numa_nodes})
    text = f"{numbered('rank', worst)} may run on processors of {numbered('NUMA node', nodes)} " + (
        "only, and the GPU lies on another" if far else "in turn"
    )
    values = {"ranks": {str(rank): places[rank].model_dump() for rank in worst}}
    return Finding(id="numa-unbound", about=row.cell, text=text, values=values)


def _busy(row: JudgedRun, left: int) -> Finding | None:
    if row.record.status == "unsupported" or row.record.on_stub:
        return None
    cores, used = row.record.environment.cores, row.run.disturbance
    if used is None or not cores:
        return _started_busy(row, left)
    threads = _needed_threads(row.record)
    needed = used.other_cores - max(0, cores - threads)
    if needed <= LEAST_CORES:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        # Without figures, so that findings of several cells merge into one sentence; the values hold them.
        text="other programs or virtual machines used the processors of ranks during timed steps",
        values={"other_cores": used.other_cores, "cores": cores, "threads": threads},
    )


def _needed_threads(record: Record) -> int:
    """Of one node: a rank that computes on a GPU keeps one thread busy with launching."""
    return node_threads(record) if record.world.device == "cpu" else record.world.ranks_per_node


def _started_busy(row: JudgedRun, left: int) -> Finding | None:
    """By the load average: of a run that did not record what others used."""
    load, cores = row.record.environment.load_average, row.record.environment.cores
    if load is None or not cores or load <= cores + left:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        text="the load average at the start exceeded cores and threads of the largest run combined: other "
        "programs, or processes of an earlier run, were running",
        values={"load_average": load, "cores": cores, "threads_of_largest_run": left},
    )


# Sections of DeepSpeed's configuration that synchronise or record within a step when they are on.
LIBRARY_LOGGERS = ("comms_logger", "flops_profiler", "wall_clock_breakdown", "dump_state")
SLOW_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT")
OFF = ("", "0", "false", "off", "version", "warn")


def find_instrumentation(runs: Runs) -> list[Finding]:
    """One finding per job whose timed windows differ in instrumentation."""
    jobs: dict[str, dict[CellName, tuple[str, ...]]] = {}
    for row in runs.rows:
        if quantities.timed_steps(row.record):
            cell = row.cell
            found = jobs.setdefault(row.record.job_id, {})
            # Of repeats, the one with the most counts.
            found[cell] = max(found.get(cell, ()), instrumentation(row.record), key=len)
    return [
        Finding(
            id="instrumented-timing",
            about=tuple(sorted({cell.label for cell, used in cells.items() if used})),
            text="the timed steps were instrumented differently: "
            + "; ".join(f"{cell.key}: {', '.join(used)}" for cell, used in cells.items() if used),
            values={cell.key: list(used) for cell, used in cells.items()},
        )
        for cells in jobs.values()
        if len(set(cells.values())) > 1
    ]


def instrumentation(record: Record) -> tuple[str, ...]:
    """Instrumentation of the timed steps of a run: probes, loggers of the library, variables."""
    found = {probe for rank in record.ranks for probe in rank.timed_probes}
    config = record.backend.native_config or {}
    found |= {name for name in LIBRARY_LOGGERS if _is_on(config.get(name))}
    variables = record.environment.variables
    found |= {
        f"{name}={variables[name]}"
        for name in SLOW_VARIABLES
        if str(variables.get(name, "")).lower() not in OFF
    }
    return tuple(sorted(found))


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled") if isinstance(value, dict) else value)


LARGE_SHARE = 0.2


def find_data_loading(runs: Runs) -> list[Finding]:
    """One finding per cell that fetches slowly in all its runs."""
    return [finding for group in runs.groups if (finding := _slow_data(group)) is not None]


def _slow_data(group: CellRuns) -> Finding | None:
    shares = [share for run in group.runs if (share := data_share(run)) is not None]
    if not shares or min(shares) <= LARGE_SHARE:
        return None
    return Finding(
        id="slow-data",
        about=group.cell,
        text=f"fetching batches takes {median(shares):.0%} of the step",
        values={
            "data_share": median(shares),
            "data_seconds": median([run.largest_median(DATA) or 0.0 for run in group.runs]),
        },
    )


def data_share(run: Run) -> float | None:
    """Largest over ranks of the share of the median step that goes into fetching; None: nothing was timed."""
    lost = run.disturbance.lost_by_rank if run.disturbance else [0.0] * len(run.record.ranks)
    shares = [
        (fetching - taken / len(run.step_seconds)) / step
        for fetching, step, taken in zip(run.rank_medians(DATA), run.rank_medians(WHOLE), lost, strict=False)
        if step
    ]
    return max(shares, default=None)


LIMIT_MARGIN = 1.1
"""A GPU holds its power limit on average over seconds; the counter is accurate to 5 %."""
SAMPLES_MARGIN = 0.25
"""Samples are those of the driver's buffer, which may hold only the last seconds of the run."""


def find_energy(runs: Runs) -> list[Finding]:
    """At most one per run: of its first rank whose energy cannot be right."""
    return of_cells(runs, _implausible)


def _implausible(row: JudgedRun) -> Finding | None:
    for rank in row.record.ranks:
        why = _why_implausible(rank.energy) if rank.energy is not None else None
        if why is not None:
            return Finding(
                id="implausible-energy", about=row.cell, text=f"GPU of rank {rank.rank}: {why}",
                values=_energy_values(rank),
            )  # fmt: skip
    return None


def _why_implausible(part: EnergyPart) -> str | None:
    watts = mean_watts(part.device_joules, part.seconds)
    if watts is None:
        return None
    limit, sampled = part.device_limit_watts, part.device_sampled_watts
    if limit is not None and watts > LIMIT_MARGIN * limit:
        return f"{watts:.0f} W on average, its power limit is {limit:.0f} W"
    if sampled is not None and abs(watts - sampled) > SAMPLES_MARGIN * sampled:
        return f"{watts:.0f} W by its energy counter, {sampled:.0f} W by its power samples"
    return None


def _energy_values(rank: RankPart) -> dict[str, object]:
    return {"rank": rank.rank, **(rank.energy.model_dump() if rank.energy else {})}
