"""Speed that was not measured, cannot be right, or is not the backend's: warm-up, neighbours, slow ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from harness.judge import quantities
from harness.judge.findings.finding import Finding, Rules, found, labels
from harness.judge.quantities import DATA, PERSISTENT_RUNS, WHOLE, Run, Seconds, is_beyond_noise, mean_watts
from harness.judge.rows import CellRuns, JudgedRun, Place, Runs
from harness.judge.run_conditions import node_threads, shares_cores
from harness.judge.statistics import LEAST_STEPS, SAME_SHARE, uninstrumented_steps
from harness.judge.wording import CellName
from harness.record import OUTSIDE, Record


def too_short(runs: Runs) -> list[Finding]:
    """Successful runs that were too short for a timed step, in one finding; none is timed on a CUDA stub."""
    ran = [r for r in runs.rows if r.record.status == "ok" and not r.record.on_stub]
    short = [r for r in ran if not quantities.timed_steps(r.record)]
    if not short:
        return []
    steps, needed = max(len(row.record.steps) for row in short), max(_needed(row.record) for row in short)
    scripts = any(row.record.observation for row in short)
    values = {"steps": steps, "needed": needed if needed > steps else None}
    return [found("nothing-timed", labels(short), values, scripts=scripts)]


def _needed(record: Record) -> int:
    """Of how many steps one is timed; a script's length is not known before, so it cools down always."""
    asked = record.measure
    if asked is None or not asked.timed:
        return 0
    watched = asked.probed_steps + asked.traced_steps
    watched += record.world.device == "cuda" and asked.traced_steps > 0  # the profiler starts
    return asked.warmup_steps + watched + (asked.cooldown_steps if record.observation and watched else 0) + 1


MEASURED_MARGIN = 1.25
"""A measured peak holds for one second; at another clock and load the machine may be faster."""
CLOCK_SHARE = 0.01
CLOCK_SECONDS = 1e-4
"""The clocks of host and device may differ by so much of a step, and by so much at its borders."""
LATE = (OUTSIDE, "data", "forward")
"""What the loop does behind a step's update."""


def outside_clock(row: JudgedRun) -> Iterator[Finding]:
    made = row.record.observed.updates_by_phase if row.record.observed is not None else {}
    if late := sum(count for phase, count in made.items() if phase in LATE):
        ahead = late == made.get("forward")
        values = {"updates_by_phase": made}
        yield found("work-outside-clock", row.cell, values, ahead=ahead, late=late, made=sum(made.values()))


def beyond_peak(row: JudgedRun) -> Iterator[Finding]:
    """More FLOP/s than the devices reach, by their sheet or as measured."""
    record = row.record
    peaks = (quantities.sheet_rate(record), 1.0), (quantities.measured_rate(record), MEASURED_MARGIN)
    for peak, margin in peaks:
        achieved = quantities.least_flops_per_second(row.run) if peak is not None else None
        if peak is not None and achieved is not None and achieved > margin * peak.flops_per_second:
            values = {
                "least_flops_per_second": achieved,
                "peak_flops_per_second": peak.flops_per_second,
                "peak_source": peak.source,
            }
            yield found("faster-than-possible", row.cell, values)
            return


def shorter_than_parts(row: JudgedRun) -> Iterator[Finding]:
    record, timed = row.record, row.run.timings
    if timed is None or timed.phases is None:
        return
    # On CUDA the host fetches the next batch while the device still works on the last.
    parts = timed.phases + timed.data if record.world.device == "cpu" else timed.phases
    missing = parts - timed.steps * (1 + CLOCK_SHARE) - CLOCK_SECONDS
    rank, step = np.unravel_index(missing.argmax(), missing.shape)
    if missing[rank, step] > 0:
        values = {
            "rank": record.ranks[rank].rank,
            "step": record.steps[quantities.first_timed(record) + int(step)].step,
            "step_seconds": float(timed.steps[rank, step]),
            "phase_seconds": float(parts[rank, step]),
        }
        yield found("inconsistent-timing", row.cell, values)


def warmup(runs: Runs) -> Iterator[Finding]:
    """One finding per cell whose timed steps begin before its steady state in all runs."""
    for group in runs.groups:
        timed = [run for run in group.runs if run.step_seconds]
        judged = [run for run in timed if len(uninstrumented_steps(run.record)[0]) >= LEAST_STEPS]
        factors = [factor for run in judged if (factor := slowed_early(run)) is not None]
        if len(factors) == len(judged) and is_beyond_noise(factors):
            steady = [run.steady_from for run in judged if run.steady_from is not None]
            values = {
                "first_timed_step": quantities.timed_steps(judged[0].record)[0].step,
                # None: the step times of a run are not steady within its first half.
                "first_steady_step": max(steady) if len(steady) == len(judged) else None,
                "warmup_steps": group.record.windows.warmup if group.record.windows else 0,
            }
            yield found("warmup-too-short", group.cell, values)


def slowed_early(run: Run) -> float | None:
    """Mean of the timed steps before the steady state over that of later ones, without what the machine took.

    None: they do not differ by more, or it is not known what the machine took.
    """
    timed = quantities.timed_steps(run.record)
    first = run.steady_from
    early = len(timed) // 2 if first is None else sum(step.step < first for step in timed)
    if run.disturbance is None or not 0 < early < len(timed):
        return None
    before, after = fmean(run.step_seconds[:early]), fmean(run.step_seconds[early:])
    longest, level = before, after
    if first is None:  # no steady level: whichever of the two are longer
        longest, level = max(before, after), min(before, after)
    own = early * (longest - level) - run.disturbance.lost_seconds
    if own <= SAME_SHARE * level * len(timed):
        return None
    return 1 + own / early / level


LEAST_CORES = 0.2
"""With so much of its core taken a rank is 1.25 times slower: what counts as a slow rank."""


def cores_shared(row: JudgedRun) -> Iterator[Finding]:
    record = row.record
    if shares_cores(record) and quantities.timed_steps(record):
        values = {"threads": node_threads(record), "cores": record.environment.cores or 0}
        yield found("cores-shared", row.cell, values)


def unbound(row: JudgedRun) -> Iterator[Finding]:
    """Ranks that may run on processors of several NUMA nodes, or of none that their GPU lies on."""
    record = row.record
    if record.on_stub or not quantities.timed_steps(record):
        return
    threads = record.world.threads_per_rank if record.world.device == "cpu" else 1
    places = {rank.rank: rank.placement for rank in record.ranks if rank.placement is not None}
    far = [r for r, p in places.items() if p.numa_nodes and p.device_numa_node not in (None, *p.numa_nodes)]
    loose = [
        r for r, p in places.items()
        if len(p.numa_nodes) > 1 and p.processor_count // len(p.numa_nodes) >= threads
    ]  # fmt: skip
    if worst := far or loose:
        nodes = sorted({node for rank in worst for node in places[rank].numa_nodes})
        values = {"ranks": {str(rank): places[rank].model_dump() for rank in worst}}
        yield found("numa-unbound", row.cell, values, far=bool(far), worst=worst, nodes=nodes)


def busy(runs: Runs) -> Iterator[Finding]:
    """One finding per run beside which other work used processors that it needed.

    By what others used, else by the load average before the run. The text has no figures, so that findings of
    several cells merge into one sentence; the values hold them.
    """
    left = max((node_threads(row.record) for row in runs.rows), default=0)
    for row in runs.rows:
        record, used = row.record, row.run.disturbance
        cores, load = record.environment.cores, record.environment.load_average
        if record.status == "unsupported" or record.on_stub or not cores:
            continue
        if used is not None:
            # A rank that computes on a GPU keeps one thread busy with launching.
            on_cpu = record.world.device == "cpu"
            threads = node_threads(record) if on_cpu else record.world.ranks_per_node
            if used.other_cores - max(0, cores - threads) > LEAST_CORES:
                values = {"other_cores": used.other_cores, "cores": cores, "threads": threads}
                yield found("busy-machine", row.cell, values, "used")
        elif load is not None and load > cores + left:
            values = {"load_average": load, "cores": cores, "threads_of_largest_run": left}
            yield found("busy-machine", row.cell, values, "load")


# Sections of DeepSpeed's configuration that synchronise or record within a step when they are on.
LIBRARY_LOGGERS = ("comms_logger", "flops_profiler", "wall_clock_breakdown", "dump_state")
SLOW_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT")
OFF = ("", "0", "false", "off", "version", "warn")


def instrumented(runs: Runs) -> list[Finding]:
    """One finding per job whose timed windows differ in instrumentation."""
    jobs: dict[str, dict[CellName, tuple[str, ...]]] = {}
    for row in runs.rows:
        if quantities.timed_steps(row.record):
            cells = jobs.setdefault(row.record.job_id, {})
            # Of repeats, the one with the most counts.
            cells[row.cell] = max(cells.get(row.cell, ()), instrumentation(row.record), key=len)
    return [
        found(
            "instrumented-timing",
            tuple(sorted({cell.label for cell, used in cells.items() if used})),
            {cell.key: list(used) for cell, used in cells.items()},
            instruments={cell.key: used for cell, used in cells.items() if used},
        )
        for cells in jobs.values()
        if len(set(cells.values())) > 1
    ]


def instrumentation(record: Record) -> tuple[str, ...]:
    """Instrumentation of the timed steps of a run: probes, loggers of the library, variables."""
    used = {probe for rank in record.ranks for probe in rank.timed_probes}
    config = record.backend.native_config or {}
    loggers = ((name, config.get(name)) for name in LIBRARY_LOGGERS)
    used |= {name for name, on in loggers if (on.get("enabled") if isinstance(on, dict) else on)}
    variables = record.environment.variables
    used |= {
        f"{name}={variables[name]}"
        for name in SLOW_VARIABLES
        if str(variables.get(name, "")).lower() not in OFF
    }
    return tuple(sorted(used))


LARGE_SHARE = 0.2


def slow_data(runs: Runs) -> Iterator[Finding]:
    """One finding per cell that fetches slowly in all its runs."""
    for group in runs.groups:
        shares = [share for run in group.runs if (share := data_share(run)) is not None]
        if shares and min(shares) > LARGE_SHARE:
            seconds = median([run.largest_median(DATA) or 0.0 for run in group.runs])
            values = {"data_share": median(shares), "data_seconds": seconds}
            seen = group.record.observation
            case = "loader" if seen is None or seen.has_loader else "between"
            yield found("slow-data", group.cell, values, case)


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


def energy(row: JudgedRun) -> Iterator[Finding]:
    """Find the first rank whose energy cannot be right: above its limit, or not what samples of power say."""
    for rank in row.record.ranks:
        part = rank.energy
        watts = mean_watts(part.device_joules, part.seconds) if part is not None else None
        if part is None or watts is None:
            continue
        limit, sampled = part.device_limit_watts, part.device_sampled_watts
        beyond = limit is not None and watts > LIMIT_MARGIN * limit
        if beyond or (sampled is not None and abs(watts - sampled) > SAMPLES_MARGIN * sampled):
            values = {"rank": rank.rank, **part.model_dump()}
            yield found("implausible-energy", row.cell, values, "limit" if beyond else "samples", watts=watts)
            return


LEAST_RANK_STEPS = 5
"""With fewer a slow rank cannot be distinguished from a disturbance."""
PERSISTENT_SHARE = 0.8
"""A rank is persistently slower if it is the slowest in at least this share of the steps."""
LEAST_SHARE_OF_STEP = 0.05
"""A smaller share of the step is not reported."""
LEAST_TRACED_STEPS = 3
"""Of all runs of a cell. One step may wait for a disk, so two must show it, and a third of many."""
LEAST_ASLEEP_SECONDS = 1e-3
"""More than on any other rank; what sound runs show is in docs/decisions.md."""
SLOWER = 1.25
"""Its median must also be this many times that of the others: cores of one machine differ by less."""
ASLEEP = "time asleep (traced steps)"


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """How much slower a rank of one run is than the others, without what the machine took from it."""

    rank: int
    what: str
    """The part of the step that is compared."""
    factor: float
    """Median of the rank over that of the others."""
    medians: dict[str, float]
    """Seconds by rank, as measured."""


def find_slow_ranks(runs: Runs) -> Iterator[Finding]:
    """One finding per run of a cell of which a rank is slow in all runs."""
    slow = {run: slow_ranks(run) for group in runs.groups for run in group.runs if run.timings is not None}
    places: dict[Place, list[Run]] = {}
    for group in runs.groups:
        places.setdefault(group.place, []).extend(run for run in group.runs if run in slow)
    for group in runs.groups:
        own = [run for run in group.runs if run in slow]
        shown = _persistent([slow[run] for run in own], [slow[run] for run in places[group.place]])
        works = [
            found(
                "slow-rank", group.cell,
                {"rank": one.rank, "what": one.what, "median_seconds": one.medians}, "works",
            )
            for one in shown
        ]  # fmt: skip
        yield from works or _asleep(group)


def _persistent(of_cell: Sequence[list[SlowRank]], of_place: Sequence[list[SlowRank]]) -> list[SlowRank]:
    """How slow, in each run of a cell, the rank is that is slow in all of them; empty if there is none."""
    for first in of_cell[0] if of_cell else []:
        if len(own := _same(first, of_cell)) < len(of_cell):
            continue
        everywhere = len(of_place) >= PERSISTENT_RUNS and len(_same(first, of_place)) == len(of_place)
        if everywhere or is_beyond_noise([slow.factor for slow in own]):
            return own
    return []


def _same(first: SlowRank, runs: Sequence[list[SlowRank]]) -> list[SlowRank]:
    """Entries of these runs with the same rank, slow in the same part of the step, as `first`."""
    return [slow for of_run in runs for slow in of_run if (slow.rank, slow.what) == (first.rank, first.what)]


def _asleep(group: CellRuns) -> list[Finding]:
    """The rank that lies idle in traced steps, outside of communication and whatever the machine took.

    What is recorded of a step is the least, and of sound ranks next to nothing, unless the machine stops for
    a moment: that touches other ranks in the same step, so only a step counts in which no other sleeps half
    as long.
    Of several threads the first waits for the others, which the machine may hold up.
    """
    world = group.record.world
    ranks = [rank.rank for rank in group.record.ranks]
    if len(ranks) < 2 or world.mesh.size("pipeline") > 1 or world.threads_per_rank > 1:
        return []
    steps = [
        [part.asleep_seconds for part in of_step]
        for run in group.runs
        for of_step in zip(*(rank.overlap for rank in run.record.ranks), strict=False)
        if len(of_step) == len(ranks)
    ]
    known = np.array([of_step for of_step in steps if None not in of_step], dtype=float)
    if len(known) < LEAST_TRACED_STEPS:
        return []
    others = np.array([np.delete(known, place, axis=1).max(axis=1) for place in range(len(ranks))])
    longer = np.where(others > np.maximum(LEAST_ASLEEP_SECONDS, known.T / 2), 0.0, known.T - others)
    # So long or longer in a third of the steps.
    often = dict(zip(ranks, np.sort(longer)[:, -max(2, math.ceil(len(known) / 3))].tolist(), strict=True))
    slowest = max(often, key=often.__getitem__)
    if often[slowest] <= LEAST_ASLEEP_SECONDS:
        return []
    values = {"rank": slowest, "what": ASLEEP, "seconds": {str(r): of for r, of in often.items()}}
    return [found("slow-rank", group.cell, values, "sleeps", longest=often[slowest])]


def slow_ranks(run: Run) -> list[SlowRank]:
    """The slow rank in each part of the step that has one; none where the machine's share is not known."""
    told = []
    for what, series in _series(run).items():
        slowest = persistently_slowest(series)
        if slowest is None or run.disturbance is None or run.median_step_seconds is None:
            continue
        lost = run.disturbance.lost_by_rank[slowest] / len(run.step_seconds)
        medians = np.median(series, axis=1)
        others = float(np.median(np.delete(medians, slowest)))
        own = float(medians[slowest]) - lost
        if own > SLOWER * others and own - others > LEAST_SHARE_OF_STEP * run.median_step_seconds:
            ranks = [rank.rank for rank in run.record.ranks]
            told.append(
                SlowRank(
                    rank=ranks[slowest],
                    what=what,
                    factor=own / others if others else math.inf,
                    medians=dict(zip(map(str, ranks), medians.tolist(), strict=True)),
                )
            )
    return told


def persistently_slowest(series: Seconds) -> int | None:
    """Index of the rank that is slowest in most steps; None: there is none."""
    if series.shape[0] < 2 or series.shape[1] < LEAST_RANK_STEPS:
        return None
    counts = np.bincount(series.argmax(axis=0))
    rank = int(counts.argmax())
    return rank if counts[rank] >= PERSISTENT_SHARE * series.shape[1] else None


def _series(run: Run) -> dict[str, Seconds]:
    """Series of seconds that contain no waiting for a slower rank, by name."""
    timed = run.timings
    if timed is None:
        return {}
    parts = {"whole steps": timed.steps}
    if run.record.world.mesh.size("pipeline") > 1:
        return parts  # stages differ in what they compute
    if "forward" in timed.seconds:
        # Ranks end a step at the same time but may begin it at different ones. A rank that begins early
        # waits in the forward pass for the others, so all are measured from the earliest begin.
        start = timed.steps.max(axis=0) - timed.steps
        parts["fetching and forward pass"] = start + timed.data + timed.seconds["forward"]
    traced = [[part.compute_seconds for part in rank.overlap] for rank in run.record.ranks]
    if len({len(parts) for parts in traced}) == 1 and traced[0]:
        parts["computing (traced steps)"] = np.array(traced)
    return parts


RULES = Rules(
    of_runs=(beyond_peak, shorter_than_parts, outside_clock, cores_shared, unbound),
    of_cells=(energy,),
    of_all=(too_short, warmup, busy, instrumented, slow_data, find_slow_ranks),
)
