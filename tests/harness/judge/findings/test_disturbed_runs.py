"""Recorded runs of sound backends that were once accused: a busy or shared machine was the cause.

`disturbed_runs.json` holds the seconds of their steps. Where a record did not say who used the processors,
nothing is taken to be lost, which is the hardest case.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.judge.findings import timing
from harness.judge.quantities import Run
from harness.record import Record
from tests.harness.judge.findings.told import told
from tests.records import make_ranks, make_record, make_steps
from tests.timed_records import processors

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("disturbed_runs.json").read_text())
NAMES = [f"{case['backend']}, {case['source']}" for case in CASES]


def recorded(case: dict[str, Any], *, undisturbed: bool = False, repeat: int = 0) -> Record:
    """The run of a case; `undisturbed`: as if other work had taken nothing."""
    count = len(case["seconds"])
    timed = zip(case["windows"], case["seconds"], strict=True)
    changes = {step: {"window": window, "seconds": seconds} for step, (window, seconds) in enumerate(timed)}
    ranks = [
        rank.model_copy(
            update=own
            | {"processors": processors(**own["processors"] if own["processors"] and not undisturbed else {})}
        )
        for rank, own in zip(make_ranks(len(case["ranks"])), case["ranks"], strict=True)
    ]
    steps = make_steps([5.0] * count, [1.0] * count, changes=changes)
    return make_record(label=case["backend"], ranks=ranks, steps=steps, repeat=repeat, run_id=f"r{repeat}")


def alarms(*records: Record) -> set[str]:
    return {finding.id for finding in told(records, "slow-rank", "warmup-too-short")}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_disturbed_run_is_not_accused(case: dict[str, Any]) -> None:
    assert alarms(recorded(case)) == set()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_the_run_shows_is_there_and_every_repeat_showing_it_would_be_found(case: dict[str, Any]) -> None:
    run = Run.of(recorded(case, undisturbed=True))
    shown = timing.slow_ranks(run) if case["alarm"] == "slow-rank" else timing.early_steps(run)
    assert shown
    repeats = [recorded(case, undisturbed=True, repeat=repeat) for repeat in range(3)]
    assert alarms(*repeats) == {case["alarm"]}
