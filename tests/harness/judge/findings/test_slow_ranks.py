"""A slow rank is told from a disturbed one."""

from typing import Any

import numpy as np
import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings import timing
from harness.judge.findings.finding import Finding
from harness.record import DimensionPart, OverlapPart, Record
from tests.records import ENVIRONMENT, make_record
from tests.timed_records import COUNT, found, phases, processors, ranks, repeats, run

SOMEWHAT = phases(0.15)
"""1.5 times as slow as the others."""
MUCH = phases(0.3)
"""Almost three times as slow."""


def slow(*records: Record) -> list[Finding]:
    return [finding for finding in found(*records) if finding.id == "slow-rank"]


def test_a_rank_that_is_slow_in_every_repeat_is_found() -> None:
    first, *others = slow(*repeats(3, ranks=ranks(4, phase_seconds=SOMEWHAT)))
    assert len(others) == 2
    assert first.values["rank"] == 1
    assert first.values["median_seconds"]["1"] == pytest.approx(0.16)
    assert first.runs is None


def test_a_rank_that_is_fast_in_one_repeat_is_not_slow() -> None:
    records = repeats(3, ranks=ranks(4, phase_seconds=MUCH))
    assert slow(*records[:2], run(repeat=2, run_id="r2", ranks=ranks(4))) == []


def test_ranks_that_are_slow_in_turns_are_not() -> None:
    records = repeats(3, ranks=ranks(2, phase_seconds=MUCH))
    first, second = ranks(2, phase_seconds=MUCH)
    swapped = [first.model_copy(update={"rank": 1}), second.model_copy(update={"rank": 0})]
    assert slow(*records[:2], run(repeat=2, run_id="r2", ranks=swapped)) == []


@pytest.mark.parametrize("runs", [1, 2])
def test_few_runs_must_show_more_than_a_neighbour_on_the_same_core_does(runs: int) -> None:
    assert slow(*repeats(runs, ranks=ranks(4, phase_seconds=SOMEWHAT))) == []
    assert len(slow(*repeats(runs, ranks=ranks(4, phase_seconds=MUCH)))) == runs


def test_a_device_that_is_slow_under_every_backend_is_found_without_repeats() -> None:
    labels = ("ddp", "zero1", "fsdp")
    records = [run(label, ranks=ranks(phase_seconds=SOMEWHAT)) for label in labels]
    assert [finding.backends for finding in slow(*records)] == [("ddp",), ("zero1",), ("fsdp",)]
    assert slow(*records, run("zero2")) == []


def test_a_rank_that_lost_its_core_to_another_program_is_not_slow() -> None:
    # 0.2 s in each of 8 steps went to another program while this rank waited.
    taken = {"machine_busy_seconds": 9.6, "process_seconds": 4.0}
    first, second = ranks(phase_seconds=MUCH)
    disturbed = [
        first.model_copy(update={"processors": processors(**taken)}),
        second.model_copy(update={"processors": processors(waiting_seconds=1.6, **taken)}),
    ]
    record = run(ranks=disturbed, environment=ENVIRONMENT | {"cores": 2})
    (busy,) = found(record)
    assert busy.id == "busy-machine"
    assert busy.values["other_cores"] == pytest.approx(0.4)


def test_a_rank_that_waits_for_a_core_because_of_another_rank_is_slow() -> None:
    # Both are bound to one core: nothing else ran, so the waiting is the run's own.
    own = {"machine_busy_seconds": 4.0, "process_seconds": 2.0, "waiting_seconds": 1.6}
    (finding,) = slow(run(ranks=ranks(phase_seconds=MUCH, processors=processors(**own))))
    assert finding.values["rank"] == 1


def test_what_a_hypervisor_took_is_not_the_rank_s() -> None:
    stolen = processors(machine_busy_seconds=6.4, machine_stolen_seconds=1.6, process_seconds=3.2)
    parts = [p.model_copy(update={"processors": stolen}) for p in ranks(phase_seconds=MUCH)]
    assert slow(run(ranks=parts)) == []


def test_a_record_that_does_not_say_who_used_the_processors_is_not_judged() -> None:
    parts = [p.model_copy(update={"processors": None}) for p in ranks(phase_seconds=MUCH)]
    assert slow(*repeats(3, ranks=parts)) == []


def traced(seconds: float) -> list[OverlapPart]:
    part = OverlapPart(
        step=3, seconds=0.5, compute_seconds=seconds, communication_seconds=0.1,
        exposed_seconds=0.1, idle_seconds=0.4 - seconds,
    )  # fmt: skip
    return [part] * 5


def test_a_rank_that_computes_longer_in_traced_steps_is_found() -> None:
    even, long = ({"overlap": traced(seconds)} for seconds in (0.1, 0.3))
    parts = [part.model_copy(update=even) for part in ranks()]
    assert slow(run(ranks=parts)) == []
    (finding,) = slow(run(ranks=[parts[0], parts[1].model_copy(update=long)]))
    assert finding.values["rank"] == 1
    assert finding.values["what"] == "computing (traced steps)"


def asleep(first: list[float], second: list[float], **changes: Any) -> Record:
    """A run whose ranks lie idle for so many milliseconds of each traced step."""
    parts = []
    for part, of_rank in zip(ranks(), (first, second), strict=True):
        steps = [traced(0.1)[0].model_copy(update={"asleep_seconds": ms / 1e3}) for ms in of_rank]
        parts.append(part.model_copy(update={"overlap": steps}))
    return run(ranks=parts, **changes)


def test_a_rank_that_sleeps_is_named_by_what_a_third_of_the_steps_shows() -> None:
    (finding,) = slow(asleep([0, 0, 0.5, 0, 0, 0], [0, 4, 5, 0, 1, 0]))
    assert finding.values["rank"] == 1
    assert finding.values["seconds"] == {"0": 0.0, "1": 0.004}
    assert finding.message == (
        "ddp on 2 ranks: rank 1 is idle for 4 ms of a step, outside of communication, and makes the others "
        "wait"
    )
    assert len(slow(asleep([1.2] * 6, [20] * 6))) == 1
    records = [asleep([0], [ms], repeat=n, run_id=f"r{n}") for n, ms in enumerate((5, 0, 4))]
    assert len(slow(*records)) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0, 0, 0], [0, 0, 40]),
        ([3, 3, 3], [4, 4, 4]),
        ([0, 0], [5, 5]),
        ([0, 0, 0], [0.9, 0.9, 0.9]),
        ([0, 6.9, 27.8], [0, 0.9, 20.4]),
        ([0, 3.4, 85, 0, 0, 0, 9.1], [0, 0, 155, 0, 0, 0, 0.6]),
        ([0, 0, 99, 1.5, 0, 0, 0], [0, 0, 49, 1.6, 0, 0, 4.6]),
    ],
    ids=[
        "one step",
        "both ranks",
        "too few steps",
        "little",
        "a disk twice",
        "a machine that stops",
        "another",
    ],
)
def test_what_is_no_sleep_of_one_rank_is_not_named(first: list[float], second: list[float]) -> None:
    assert slow(asleep(first, second)) == []


def test_threads_of_a_rank_wait_for_each_other_and_stages_for_other_stages() -> None:
    record = asleep([0] * 3, [5] * 3)
    threads = record.world.model_copy(update={"threads_per_rank": 2})
    assert slow(record.model_copy(update={"world": threads})) == []
    dimensions = [DimensionPart(name="pipeline", size=2)]
    stages = record.world.model_copy(update={"dimensions": dimensions})
    assert slow(record.model_copy(update={"world": stages})) == []


def test_ranks_that_take_turns_within_a_run_are_not_slow() -> None:
    even = [0.4 if n % 2 else 0.1 for n in range(COUNT)]
    odd = [0.1 if n % 2 else 0.4 for n in range(COUNT)]
    rest: dict[str, Any] = {"backward": [0.05] * COUNT, "step": [0.01] * COUNT}
    first, second = ranks(phase_seconds={"forward": odd, **rest})
    first = first.model_copy(update={"phase_seconds": {"forward": even, **rest}})
    assert slow(*repeats(3, ranks=[first, second])) == []


def test_a_rank_that_began_early_and_waits_in_the_forward_pass_is_not_slow() -> None:
    # Rank 0 begins 0.05 s late; rank 1 waits for its broadcast, and both end together.
    waits = {"forward": [0.15] * COUNT, "backward": [0.3] * COUNT, "step": [0.05] * COUNT}
    assert slow(*repeats(3, ranks=ranks(phase_seconds=waits, step_seconds=[0.55] * COUNT))) == []


def test_a_difference_that_is_small_compared_with_the_step_is_not_told() -> None:
    parts = [part.model_copy(update={"phase_seconds": phases(0.005)}) for part in ranks()]
    parts[1] = parts[1].model_copy(update={"phase_seconds": phases(0.025)})
    assert slow(*repeats(3, ranks=parts)) == []


def test_the_slowest_rank_is_that_of_most_steps() -> None:
    series = np.array([[1.0] * 10, [2.0] * 8 + [0.5] * 2])
    assert timing.persistently_slowest(series) == 1
    assert timing.persistently_slowest(np.array([[1.0] * 10, [2.0] * 7 + [0.5] * 3])) is None
    assert timing.persistently_slowest(series[:, :4]) is None
    assert Comparison([make_record()]).findings == []
