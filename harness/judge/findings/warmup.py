"""Warm-ups that end before the step times are steady."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.judge import measures
from harness.judge.disturbance import is_beyond_noise
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Repeats, Runs
from harness.judge.run import Run
from harness.judge.statistics import LEAST_STEPS, SAME_SHARE, uninstrumented_steps
from harness.record import Record


@dataclass(frozen=True, kw_only=True)
class Early:
    """Timed steps of one run that differ from those after them by more than the machine explains."""

    first_timed: int
    first_steady: int | None
    """None: the step times are not steady within the first half of the run."""
    factor: float
    """Between the mean of early and later steps, without what the machine took; at least 1."""


def find(runs: Runs) -> list[Finding]:
    """One finding per cell whose timed steps begin before its steady state in all runs."""
    return [finding for group in runs.groups if (finding := _judge(group)) is not None]


def _judge(group: Repeats) -> Finding | None:
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
    timed = measures.timed_steps(run.record)
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
