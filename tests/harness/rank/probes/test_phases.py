"""Phases are summed over micro-steps, by the host's clock and by events of a stream."""

import itertools

import pytest
import torch

from harness.rank.probes import time
from harness.rank.probes.time import Clock, CudaPhaseTimer, HostPhaseTimer
from harness.record import OUTSIDE


class FakeEvent:
    """Stands in for torch.cuda.Event: recorded one after the other, a second apart."""

    clock = itertools.count()
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)


def two_micro_steps(timer: time.PhaseTimer) -> dict[str, float]:
    for _ in range(2):
        for phase in (None, "forward", "backward"):
            timer.enter(phase)
    timer.enter("step")
    timer.enter(None)
    return timer.take()


def test_the_host_sums_what_its_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time.time, "perf_counter", lambda: float(next(ticks)))
    timer = HostPhaseTimer()
    expected = {"forward": 2.0, "backward": 2.0, "step": 1.0}
    assert two_micro_steps(timer) == expected
    assert two_micro_steps(timer) == expected


def test_events_are_read_pairwise_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", 0)
    timer = CudaPhaseTimer()
    expected = {"forward": 2.0, "backward": 2.0, "step": 1.0}
    assert two_micro_steps(timer) == expected
    assert two_micro_steps(timer) == expected
    assert FakeEvent.made == 8


@pytest.mark.parametrize("interrupted", range(24))
def test_no_moment_of_a_step_counts_twice_wherever_the_rank_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """Before one look at the clock 100 s go by: fetching and phases are still no longer than their step."""
    looks = itertools.count()
    monkeypatch.setattr(
        time.time, "perf_counter", lambda: (look := next(looks)) + 100.0 * (look >= interrupted)
    )
    clock = Clock("cpu")
    clock.begin()
    for _ in range(3):
        for phase in ("data", "forward", "backward"):
            clock.enter(phase, last=False)
    clock.enter("step", last=True)
    clock.enter(OUTSIDE, last=True)
    clock.end()
    facts = clock.facts()
    assert facts["data_seconds"] + sum(facts["phase_seconds"].values()) <= facts["seconds"]
