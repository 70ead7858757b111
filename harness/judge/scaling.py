"""Strong and weak scaling: time, speed-up and efficiency over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from harness.job.job import Job
from harness.judge.comparison import Comparison
from harness.judge.metrics import STEP
from harness.judge.ranking import Ratio, ratios
from harness.judge.repeats import CellRuns, group_repeats
from harness.judge.run_conditions import labelled, varying, words
from harness.judge.wording import counted
from harness.record import WorldPart

GROWING = ("job", "nodes", "micro-batch")
"""Run conditions that may change along one curve. On the CPU the threads of a rank may not: two ranks of one
thread have no more processors than one of two."""
LAYOUTS: tuple[Callable[[WorldPart], str], ...] = (
    lambda world: counted(world.nodes, "node"),
    lambda world: f"micro-batch {world.micro_batch_size}",
)
"""What may change along a curve, in words: one number of ranks in several layouts has a curve of each."""
CUT = {"global_batch_size", "micro_batch_size", "accumulation_steps"}
"""Settings that weak scaling changes with the number of ranks; the model may grow too."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One number of ranks of one backend, compared with the smallest that was run."""

    group: CellRuns
    base: CellRuns
    curve: str
    """Name of the curve that it lies on: the backend, and how it differs from its other curves."""
    ratio: Ratio = field(default_factory=lambda: Ratio(rounds=0))
    """Speed of a step over that of the base in the same rounds; asked together with all other points."""

    @property
    def step_seconds(self) -> float:
        """Mean timed step of the median run, in seconds: tokens of a step over tokens per second."""
        return _step(self.group)

    @property
    def training_seconds(self) -> float:
        """The timed step times the steps of the job: without set-up and evaluations."""
        return self.step_seconds * len(self.group.record.steps)

    @property
    def ranks_ratio(self) -> float:
        """N / N0."""
        return self.group.world_size / self.base.world_size

    @property
    def speed_up(self) -> float:
        """T(N0) / T(N) of a step in the same rounds; of runs that share none, of their medians.

        With equal work also called scale factor.
        """
        return self.ratio.middle or _step(self.base) / self.step_seconds

    @property
    def strong_efficiency(self) -> float:
        """Speed-up over the ratio of ranks: 1 is ideal."""
        return self.speed_up / self.ranks_ratio

    @property
    def weak_efficiency(self) -> float:
        """T(N0) / T(N) of equal work per rank: 1 is ideal, below it ranks cost time."""
        return self.speed_up

    @property
    def work_ratio(self) -> float | None:
        """Parameters x tokens per rank over that of the base: 1 in true weak scaling; None: unknown."""
        here, there = _work(self.group), _work(self.base)
        return here / there if here is not None and there else None


def strong_scaling(comparison: Comparison) -> list[list[ScalingPoint]]:
    """Backends that ran one job on several numbers of ranks, each from its smallest on.

    Where one number of ranks ran in several layouts, each layout has a curve of its own. Runs that are not
    the same job are left out. Where a backend was not run on one rank, the reference on one process of the
    same job is its base, unless jobs grow with the ranks: then only weak scaling is asked for.
    """
    timed = _timed(comparison.comparable.groups)
    names = _separating(timed)
    references: dict[tuple[str, str], CellRuns] = {}
    curves: dict[tuple[str, str, str], list[CellRuns]] = {}
    for group in timed:
        job_id, conditions = group.record.job_id, words(group.record, names)
        if group.is_reference:
            references.setdefault((job_id, conditions), group)
        else:
            curves.setdefault((job_id, group.backend, conditions), []).append(group)
    found = []
    grows = bool(weak_scaling(comparison))
    for (job_id, label, conditions), groups in curves.items():
        base = references.get((job_id, conditions))
        if min(group.world_size for group in groups) > 1 and base is not None and not grows:
            groups = [base, *groups]
        if len({group.world_size for group in groups}) > 1:
            found += _curves(groups, label, conditions)
    return _compared(found)


def weak_scaling(comparison: Comparison) -> list[list[ScalingPoint]]:
    """Backends whose jobs grow with the number of ranks and are otherwise the same.

    The batch, the model or both may grow: the job with more ranks must be another one. Runs that are not
    what their own job says are left out.
    """
    own = [row for row in comparison.rows if row.is_comparable or row.is_of_another_job]
    timed = _timed(group_repeats(own))
    names = _separating(timed)
    curves: dict[tuple[str, str, str], list[CellRuns]] = {}
    for group in timed:
        if not group.is_reference:
            key = _without_size(group.record.job), group.backend, words(group.record, names)
            curves.setdefault(key, []).append(group)
    found = []
    for (_, label, conditions), groups in curves.items():
        sizes = {group.world_size for group in groups}
        jobs = {group.record.job_id for group in groups}
        pairs = {(group.world_size, group.record.job_id) for group in groups}
        if len(sizes) > 1 and len(sizes) == len(jobs) == len(pairs):
            found += _curves(groups, label, conditions)
    return _compared(found)


def _compared(curves: list[list[ScalingPoint]]) -> list[list[ScalingPoint]]:
    """Each point with its speed over that of its base, round by round."""
    every = {(number, point.group.key): point for number, curve in enumerate(curves) for point in curve}
    asked = {
        key: point.group.log_ratios(point.base, STEP)
        for key, point in every.items()
        if point.group is not point.base
    }
    found = ratios(asked)
    return [
        [replace(point, ratio=found.get((number, point.group.key), point.ratio)) for point in curve]
        for number, curve in enumerate(curves)
    ]


def _timed(groups: Sequence[CellRuns]) -> list[CellRuns]:
    """Successful and timed; those that diverged do other work."""
    return [g for g in groups if g.has_result and g.values(STEP) and g.parity != "diverged"]


def _separating(groups: Sequence[CellRuns]) -> list[str]:
    """Names of the run conditions that put runs on different curves."""
    harmless = () if any(group.record.world.device == "cpu" for group in groups) else ("threads",)
    names = varying(group.record for group in groups)
    return [name for name in names if name not in (*GROWING, *harmless)]


def _curves(groups: Sequence[CellRuns], label: str, conditions: str) -> list[list[ScalingPoint]]:
    """One curve, or one for each layout where one number of ranks ran in several.

    All of them begin at the fewest ranks on the fewest nodes.
    """
    ordered = sorted(groups, key=lambda group: (group.world_size, group.record.world.nodes))
    base = ordered[0]
    telling = [layout for layout in LAYOUTS if _varies_at_one_size(ordered, layout)]
    layouts: dict[str, list[CellRuns]] = {}
    for group in ordered:
        shown = ", ".join(layout(group.record.world) for layout in telling)
        layouts.setdefault(shown, []).append(group)
    curves = []
    for shown, members in layouts.items():
        if len(members) == 1 and members[0] is base:
            continue
        name = labelled(label, ", ".join(filter(None, (conditions, shown))))
        starts = [base] if members[0].world_size > base.world_size else []
        curves.append([ScalingPoint(group=group, base=base, curve=name) for group in [*starts, *members]])
    return curves


def _varies_at_one_size(groups: Sequence[CellRuns], layout: Callable[[WorldPart], str]) -> bool:
    sizes = {group.world_size for group in groups}
    return len({(group.world_size, layout(group.record.world)) for group in groups}) > len(sizes)


def _step(group: CellRuns) -> float:
    return median(group.values(STEP))


def _work(group: CellRuns) -> float | None:
    record = group.record
    tokens = record.steps[-1].tokens if record.steps else None
    if record.initial_weights is None or tokens is None:
        return None
    return record.initial_weights.parameter_count * tokens / group.world_size


def _without_size(job: Job) -> str:
    """The job without what weak scaling grows, as a key."""
    return job.model_dump_json(exclude={"model": {"config", "name"}, "training": CUT})
