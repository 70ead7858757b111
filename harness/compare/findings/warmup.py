"""Warm-ups that end before the step times are steady."""

from __future__ import annotations

from statistics import fmean

from harness.compare import measures
from harness.compare.findings.finding import Finding, Kind, of_cells
from harness.compare.rows import Row
from harness.compare.runs import Runs
from harness.compare.steady_state import LEAST_STEPS, SAME_SHARE, uninstrumented_steps
from harness.record import Record

KINDS = (
    Kind(
        id="warmup-too-short",
        title="Steps were timed before their duration was steady",
        cause="The first steps allocate, compile, tune or fill caches, and the warm-up ends before that is "
        "done; or the machine changed its speed during the measurement.",
        confirm="The values name the first timed step and the first steady one (MSER on the running median "
        "of the step times); see the seconds of the steps in the record. Reported if the timed steps take on "
        "average more than 5 % longer than those from the first steady one on.",
        fix="Raise `measure.warmup_steps` to the first steady step, and `training.steps` with it. If no step "
        "is steady, measure longer, or on an otherwise idle machine.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per run whose timed steps begin before its steady state."""
    return of_cells(runs, _judge)


def _judge(row: Row) -> Finding | None:
    timed = measures.timed_steps(row.record)
    if not timed or len(uninstrumented_steps(row.record)[0]) < LEAST_STEPS:
        return None
    first_timed = timed[0].step
    first_steady = row.run.steady_from
    if first_steady is not None:
        steady = [step.seconds for step in timed if step.step >= first_steady]
        if fmean(row.run.step_seconds) <= (1 + SAME_SHARE) * fmean(steady):
            return None
    steady_when = (
        "do not become steady within the first half of the run"
        if first_steady is None
        else f"are steady from step {first_steady}"
    )
    return Finding(
        id="warmup-too-short",
        about=row.cell,
        text=f"timing begins at step {first_timed}, steps {steady_when}",
        values={
            "first_timed_step": first_timed,
            "first_steady_step": first_steady,
            "warmup_steps": _warmup(row.record),
        },
    )


def _warmup(record: Record) -> int:
    return record.windows.warmup if record.windows else 0
