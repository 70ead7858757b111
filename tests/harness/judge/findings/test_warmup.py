"""Steps that are timed too early are told from a machine that changes its speed."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.judge.findings.finding import Finding
from harness.record import Record
from tests.timed_records import found, processors, ranks, repeats, run, steps

LONG = (3.0, 3.0, 9.0, 9.0, 2.5, 2.0, *[0.5] * 6)
"""Timing begins at step 4; the steps are steady from step 6."""
SOMEWHAT = (0.7, 0.7, 9.0, 9.0, 0.7, 0.7, *[0.5] * 6)
"""The early steps take 1.4 times as long."""
STEADY = (3.0, 2.0, 9.0, 9.0, *[0.5] * 8)


def early(*records: Record) -> list[Finding]:
    return [finding for finding in found(*records) if finding.id == "warmup-too-short"]


def lasting(count: int, seconds: Sequence[float], **changes: Any) -> list[Record]:
    return repeats(count, steps=steps(seconds), **changes)


def test_timing_that_begins_before_the_steady_state_is_found() -> None:
    (finding,) = early(run(steps=steps(LONG)))
    assert finding.values == {"first_timed_step": 4, "first_steady_step": 6, "warmup_steps": 1}
    assert finding.clause == "timing begins at step 4, steps are steady from step 6"


def test_early_steps_that_are_longer_in_every_repeat_are_found() -> None:
    (finding,) = early(*lasting(3, SOMEWHAT))
    assert finding.values["first_steady_step"] == 6


@pytest.mark.parametrize("count", [1, 2])
def test_few_runs_must_show_more_than_a_host_that_changes_its_speed(count: int) -> None:
    assert early(*lasting(count, SOMEWHAT)) == []
    assert len(early(*lasting(count, LONG))) == 1


def test_a_repeat_that_is_steady_when_timing_begins_clears_the_others() -> None:
    assert early(*lasting(2, LONG), run(repeat=2, run_id="r2", steps=steps(STEADY))) == []


def test_the_latest_steady_step_of_the_repeats_is_told() -> None:
    sooner = (3.0, 3.0, 9.0, 9.0, 2.5, *[0.5] * 7)
    (finding,) = early(*lasting(2, sooner), run(repeat=2, run_id="r2", steps=steps(LONG)))
    assert finding.values["first_steady_step"] == 6


def test_early_steps_that_waited_for_a_processor_are_no_warmup() -> None:
    # 3.5 s longer than the others, of which another program took 3.4 s.
    taken = processors(waiting_seconds=3.4, machine_busy_seconds=11.4)
    parts = [rank.model_copy(update={"processors": taken}) for rank in ranks()]
    assert early(run(steps=steps(LONG), ranks=parts)) == []
    assert early(*lasting(3, LONG, ranks=parts)) == []


def test_a_record_that_does_not_say_who_used_the_processors_is_not_judged() -> None:
    parts = [rank.model_copy(update={"processors": None}) for rank in ranks()]
    assert early(*lasting(3, LONG, ranks=parts)) == []


def test_steps_that_never_become_steady_are_found() -> None:
    (finding,) = early(*lasting(3, (4.0, 4.0, 9.0, 9.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0)))
    assert finding.values["first_steady_step"] is None
    assert "do not become steady" in finding.clause


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param((3.0, 2.0, 9.0, 9.0, 0.55, 0.55, *[0.5] * 6), id="hardly changes the average"),
        pytest.param(STEADY, id="covered by the warm-up"),
    ],
)
def test_early_steps_that_cost_nothing_are_not_told(seconds: Sequence[float]) -> None:
    assert early(*lasting(3, seconds)) == []
