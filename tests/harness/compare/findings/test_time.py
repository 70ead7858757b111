"""Planted defects of time, at the level of records."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.compare.comparison import Comparison
from harness.compare.findings import impossible
from harness.compare.findings.finding import Finding
from harness.record import LayoutPart, OverlapPart, RankPart, Record, TensorPart
from tests.records import ENVIRONMENT, make_model, make_ranks, make_record, make_steps

WINDOWS = ("warmup", "warmup", "probed", "traced", *["timed"] * 8)
COUNT = len(WINDOWS)
PHASES = {"forward": 0.1, "backward": 0.3, "step": 0.05}


def steps(seconds: Sequence[float] = (0.5,) * COUNT) -> list[Any]:
    changes = {n: {"window": w, "seconds": s} for n, (w, s) in enumerate(zip(WINDOWS, seconds, strict=True))}
    return make_steps([5.0] * COUNT, [1.0] * COUNT, changes=changes)


def ranks(count: int = 2, **changes: Any) -> list[RankPart]:
    """Ranks of the steps above, alike but for `changes` to rank 1."""
    values = {
        "step_seconds": [0.5] * COUNT,
        "data_seconds": [0.01] * COUNT,
        "phase_seconds": {name: [seconds] * COUNT for name, seconds in PHASES.items()},
    }
    parts = [part.model_copy(update=values) for part in make_ranks(count)]
    return [*parts[:1], parts[1].model_copy(update=changes), *parts[2:]] if count > 1 else parts


def run(label: str = "ddp", **changes: Any) -> Record:
    return make_record(label=label, **({"steps": steps(), "ranks": ranks()} | changes))


def found(*records: Record) -> list[Finding]:
    reference = make_record(steps=steps(), ranks=ranks(1))
    return Comparison([reference, *records]).findings


def test_a_clean_run_raises_nothing() -> None:
    assert found(run()) == []


def test_a_rank_with_a_slow_forward_pass_is_found() -> None:
    phases = {name: [seconds] * COUNT for name, seconds in PHASES.items()}
    phases |= {"forward": [0.15] * COUNT, "backward": [0.2] * COUNT}
    (finding,) = found(run(ranks=ranks(4, phase_seconds=phases)))
    assert finding.id == "slow-rank"
    assert finding.values["rank"] == 1
    assert finding.values["median_seconds"]["1"] == pytest.approx(0.16)


def test_a_rank_that_computes_longer_in_traced_steps_is_found() -> None:
    def traced(seconds: float) -> list[OverlapPart]:
        part = OverlapPart(
            step=3, seconds=0.5, compute_seconds=seconds, communication_seconds=0.1,
            exposed_seconds=0.1, idle_seconds=0.4 - seconds,
        )  # fmt: skip
        return [part] * 5

    parts = [rank.model_copy(update={"overlap": traced(0.2)}) for rank in ranks()]
    slow = parts[1].model_copy(update={"overlap": traced(0.3)})
    assert found(run(ranks=parts)) == []
    (finding,) = found(run(ranks=[parts[0], slow]))
    assert (finding.id, finding.values["rank"]) == ("slow-rank", 1)


def test_ranks_that_take_turns_being_slow_are_not() -> None:
    even = [0.3 if n % 2 else 0.1 for n in range(COUNT)]
    odd = [0.1 if n % 2 else 0.3 for n in range(COUNT)]
    parts = ranks(phase_seconds={"forward": odd, "backward": [0.1] * COUNT, "step": [0.01] * COUNT})
    first = {"forward": even, "backward": [0.1] * COUNT, "step": [0.01] * COUNT}
    parts[0] = parts[0].model_copy(update={"phase_seconds": first})
    assert found(run(ranks=parts)) == []


def test_a_rank_that_began_early_and_waits_in_the_forward_pass_is_not_slow() -> None:
    # Rank 0 begins 0.05 s late; rank 1 waits for its broadcast, and both end together.
    phases = {name: [seconds] * COUNT for name, seconds in PHASES.items()} | {"forward": [0.15] * COUNT}
    assert found(run(ranks=ranks(phase_seconds=phases, step_seconds=[0.55] * COUNT))) == []


def test_a_difference_that_is_small_beside_the_step_is_not_told() -> None:
    phases = {"forward": [0.01] * COUNT, "backward": [0.4] * COUNT, "step": [0.01] * COUNT}
    parts = [part.model_copy(update={"phase_seconds": phases}) for part in ranks()]
    slower = {**phases, "forward": [0.02] * COUNT}
    parts[1] = parts[1].model_copy(update={"phase_seconds": slower})
    assert found(run(ranks=parts)) == []


def test_slow_data_is_found() -> None:
    (finding,) = found(run(ranks=ranks(data_seconds=[0.15] * COUNT, phase_seconds={})))
    assert finding.id == "slow-data"
    assert finding.values["data_share"] == pytest.approx(0.3)


def test_a_timer_that_stops_before_the_device_has_finished_is_found() -> None:
    # The host's clock saw 20 ms, the device's events half a second.
    parts = [part.model_copy(update={"step_seconds": [0.02] * COUNT}) for part in ranks()]
    world = run().world.model_copy(update={"device": "cuda"})
    (finding,) = [f for f in found(run(ranks=parts, world=world)) if f.id != "slow-data"]
    assert finding.id == "inconsistent-timing"
    assert finding.values["step_seconds"] == 0.02
    assert finding.values["phase_seconds"] == pytest.approx(0.45)


def test_fetching_counts_on_the_cpu_and_overlaps_on_cuda() -> None:
    parts = [part.model_copy(update={"data_seconds": [0.09] * COUNT}) for part in ranks()]
    assert [f.id for f in found(run(ranks=parts))] == ["inconsistent-timing"]
    world = run().world.model_copy(update={"device": "cuda"})
    assert found(run(ranks=parts, world=world)) == []


def billion(seconds: float, **of_ranks: Any) -> Record:
    """A model of 10^9 parameters on two A100, 1024 tokens a step: 6.1e12 FLOPs."""
    shape = {"multiplying_parameters": 10**9, "layers": 1, "attention_width": 1}
    parts = [
        rank.model_copy(
            update={
                "device_name": "NVIDIA A100-SXM4-80GB", "phase_seconds": {}, "data_seconds": [0.0] * COUNT,
                "step_seconds": [seconds] * COUNT, **of_ranks,
            }
        )
        for rank in ranks()
    ]  # fmt: skip
    tensor = TensorPart(name="h.0.weight", shape=[30_000, 30_000], dtype="float32")
    layout = LayoutPart(parameters=[tensor], decaying=[], buffers=[], blocks=["h.0"])
    record = run(ranks=parts, steps=steps([seconds] * COUNT), layout=layout)
    return record.model_copy(update={"model": make_model(geometry=shape)})


def impossible_ones(record: Record) -> list[Finding]:
    """This module alone: the collectives of these records are not those of the model."""
    return impossible.find(Comparison([record]))


def test_throughput_beyond_the_data_sheet_is_found() -> None:
    # fp32 on two A100 is 39 TFLOP/s at most: 6.1e12 in 0.1 s is too much, in 0.2 s it is not.
    (finding,) = impossible_ones(billion(0.1))
    assert finding.id == "faster-than-possible"
    assert finding.values["peak_flops_per_second"] == pytest.approx(39e12)
    assert impossible_ones(billion(0.2)) == []


def test_throughput_beyond_the_measured_peak_is_found() -> None:
    rates = {"float32": 1e12}
    (finding,) = impossible_ones(billion(0.5, device_name="cpu", matmul_flops_per_second=rates))
    assert finding.id == "faster-than-possible"
    assert finding.values["peak_source"] == "measured"


def test_without_a_peak_nothing_is_impossible() -> None:
    assert impossible_ones(billion(1e-6, device_name="cpu")) == []


def test_timing_that_begins_before_the_steady_state_is_found() -> None:
    slow = (3.0, 3.0, 9.0, 9.0, 2.5, 2.0, *[0.5] * 6)
    (finding,) = found(run(steps=steps(slow)))
    assert finding.id == "warmup-too-short"
    assert finding.values == {"first_timed_step": 4, "first_steady_step": 6, "warmup_steps": 1}


def test_slow_steps_that_hardly_change_the_average_are_not_told() -> None:
    nearly = (3.0, 2.0, 9.0, 9.0, 0.55, 0.55, *[0.5] * 6)
    assert found(run(steps=steps(nearly))) == []


def test_a_warmup_that_covers_the_slow_steps_is_long_enough() -> None:
    assert found(run(steps=steps((3.0, 2.0, 9.0, 9.0, *[0.5] * 8)))) == []


def test_a_probe_at_work_in_the_timed_steps_of_one_row_is_found() -> None:
    (finding,) = found(run(ranks=ranks(timed_probes=["counter"])))
    assert finding.id == "instrumented-timing"
    assert finding.backends == ("ddp",)
    assert finding.values == {"single on 1": [], "ddp on 2": ["counter"]}


def test_a_library_logger_in_one_row_is_found() -> None:
    backend = run("zero1").backend.model_copy(update={"native_config": {"comms_logger": {"enabled": True}}})
    (finding,) = found(run("zero1", backend=backend))
    assert finding.values["zero1 on 2"] == ["comms_logger"]


def test_a_debugging_variable_in_one_row_is_found_and_in_all_it_is_not() -> None:
    environment = ENVIRONMENT | {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}
    (finding,) = found(run(environment=environment))
    assert finding.values["ddp on 2"] == ["CUDA_LAUNCH_BLOCKING=1"]
    both = [make_record(steps=steps(), ranks=ranks(1), environment=environment), run(environment=environment)]
    assert Comparison(both).findings == []
