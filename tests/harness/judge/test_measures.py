from typing import Any

import pytest

from harness.judge import quantities
from harness.record import BackendPart, EvaluationPart, Record, WindowsPart
from tests.records import make_communication, make_effective, make_record, make_steps


def test_rates_take_timed_steps_only() -> None:
    steps = make_steps(changes={0: {"seconds": 100.0}, 1: {"seconds": 100.0}, 3: {"seconds": 1.5}})
    record = make_record(steps=steps)
    assert quantities.rate(record, "tokens") == 1024.0
    assert quantities.rate(record, "samples") == 8.0
    assert quantities.median_step_seconds(record) == 1.0


def test_run_without_timed_steps_has_no_rate() -> None:
    record = make_record(steps=make_steps()[:2])
    assert quantities.rate(record, "tokens") is None
    assert quantities.median_step_seconds(record) is None


def test_evaluations_are_timed_once_steps_are() -> None:
    """Steps 2 and 3 are timed: what was evaluated before the end of step 2 has probes around it."""
    parts = [
        EvaluationPart(step=step, loss=5.0, target_tokens=254, samples=6, seconds=seconds)
        for step, seconds in ((1, 100.0), (2, 100.0), (3, 0.5), (4, 1.5))
    ]
    assert quantities.timed_evaluations(make_record(eval=parts)) == [(6, 0.5), (6, 1.5)]
    assert quantities.evaluation_rate(make_record(eval=parts)) == (12 + 4) / 2
    assert quantities.evaluation_rate(make_record(eval=parts[:2])) is None
    untimed = EvaluationPart(step=4, loss=5.0, target_tokens=1)
    assert quantities.evaluation_rate(make_record(eval=[untimed])) is None, "an older record"


def with_moments(*changes: dict[str, Any]) -> Record:
    """A record of as many ranks, whose only moment of memory is changed."""
    record = make_record(label="ddp", world_size=len(changes))
    ranks = [
        rank.model_copy(update={"memory": [rank.memory[0].model_copy(update=change)]})
        for rank, change in zip(record.ranks, changes, strict=True)
    ]
    return record.model_copy(update={"ranks": ranks})


KINDS = {"weights": 1, "gradients": 2, "masters": 4, "optimizer": 8, "gathered": 16, "buffers": 32}


@pytest.mark.parametrize(
    ("changes", "peaks", "states"),
    [
        ([{}, {}], [2_000_000, 2_001_000], 16_000),
        ([{"peak_bytes": None, "kinds": None}], [], None),
        ([{"kinds": KINDS}], [2_000_000], 15),
        ([{"kinds": {"weights": 3}}, {"kinds": {"weights": 5}}], [2_000_000, 2_001_000], 5),
    ],
    ids=["each rank", "no counting allocator", "without gathered weights and buffers", "largest rank"],
)
def test_peaks_are_each_ranks_and_states_the_largest(
    changes: list[dict[str, Any]], peaks: list[int], states: int | None
) -> None:
    record = with_moments(*changes)
    assert quantities.peak_bytes(record) == peaks
    assert quantities.model_state_bytes(record) == states


def test_sent_bytes_are_ring_bytes_per_probed_step_and_rank() -> None:
    communication = make_communication(4, "all_reduce", 4000) + make_communication(4, "all_gather", 800)
    record = make_record(
        label="ddp", world_size=4, comm=communication, windows=WindowsPart(warmup=1, probed=2, timed=1)
    )
    assert quantities.sent_bytes_per_step(record) == (1.5 * 4000 + 0.75 * 800) / 2


def test_only_the_steps_are_sent_per_step() -> None:
    outside = [
        row.model_copy(update={"phase": phase})
        for phase in ("setup", "digest", "evaluation", "checkpoint")
        for row in make_communication(2)
    ]
    record = make_record(label="ddp", comm=[*make_communication(2), *outside])
    assert quantities.sent_bytes_per_step(record) == 4000


def test_gloo_sends_a_reduce_scatter_as_an_all_reduce() -> None:
    communication = make_communication(4, "reduce_scatter", 800) + make_communication(4, "all_gather", 800)
    record = make_record(label="fsdp", world_size=4, comm=communication)
    assert quantities.sent_bytes_per_step(record) == 600 + 600
    assert quantities.transport_bytes_per_step(record) == 1200 + 600
    world = record.world.model_copy(update={"collectives": "nccl"})
    assert quantities.transport_bytes_per_step(record.model_copy(update={"world": world})) == 1200


def test_run_without_probed_steps_has_no_volume() -> None:
    record = make_record(label="ddp", windows=WindowsPart(warmup=1, probed=0, timed=3))
    assert quantities.sent_bytes_per_step(record) is None


@pytest.mark.parametrize(
    ("label", "ranks", "effective", "sent"),
    [
        ("ddp", 2, {}, 4000.0),
        ("zero1", 2, {}, 4000.0),
        ("zero3", 2, {}, 6000.0),
        ("single", 2, {}, 0.0),
        ("fsdp", 2, {"parameter_dtype": "bfloat16", "reduce_dtype": "float32"}, 4000.0),
        ("fsdp-hybrid", 4, {"details": {"shard_size": 2}}, 0.5 * 1000 * 12 + 2 * 0.5 * 500 * 4),
        ("mine", 2, {}, None),
        ("ddp", 2, None, None),
    ],
)
def test_textbook_volume_follows_the_strategy_and_what_ran(
    label: str, ranks: int, effective: dict[str, Any] | None, sent: float | None
) -> None:
    ran = None if effective is None else make_effective(**effective)
    part = BackendPart(label=label, name=label, effective=ran)
    record = make_record(label=label, world_size=ranks, backend=part)
    assert quantities.textbook_bytes_per_step(record) == sent


def test_host_peak_is_that_of_the_largest_process() -> None:
    record = make_record(label="ddp")
    sizes = (5, 7)
    parts = [
        part.model_copy(update={"host_peak_bytes": size})
        for part, size in zip(record.ranks, sizes, strict=True)
    ]
    assert quantities.host_peak_bytes(record.model_copy(update={"ranks": parts})) == 7
    assert quantities.host_peak_bytes(record.model_copy(update={"ranks": []})) is None


@pytest.mark.parametrize("reporting", [[], [0], [1]])
def test_bytes_of_a_killed_run_are_unknown_unless_every_rank_reported(reporting: list[int]) -> None:
    rows = [row for row in make_communication(2) if row.rank in reporting]
    killed = make_record(label="ddp", status="failed", comm=rows)
    assert quantities.sent_bytes_per_step(killed) is None
    assert quantities.transport_bytes_per_step(killed) is None
    assert quantities.sent_bytes_per_step(make_record(label="ddp", status="failed")) is not None


def test_bytes_of_a_killed_run_on_one_rank_are_unknown() -> None:
    assert quantities.sent_bytes_per_step(make_record(status="failed")) is None
