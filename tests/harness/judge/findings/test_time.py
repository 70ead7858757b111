"""Planted defects of time, at the level of records."""

from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import LayoutPart, Record, TensorPart
from tests.harness.judge.findings.told import told
from tests.records import ENVIRONMENT, make_model, make_record
from tests.timed_records import COUNT, found, processors, ranks, run, steps


def test_a_clean_run_raises_nothing() -> None:
    assert found(run()) == []


def test_slow_data_is_found() -> None:
    (finding,) = found(run(ranks=ranks(data_seconds=[0.15] * COUNT, phase_seconds={})))
    assert finding.id == "slow-data"
    assert finding.values["data_share"] == pytest.approx(0.3)


def test_fetching_that_is_slow_in_only_some_repeats_is_not_told() -> None:
    slow = run(ranks=ranks(data_seconds=[0.15] * COUNT, phase_seconds={}))
    fast = run(repeat=1, run_id="r1")
    assert found(slow, fast) == []


def test_fetching_that_waits_for_a_processor_is_not_slow() -> None:
    # 0.15 s of fetching in 8 steps: 0.8 s of the 1.2 s are another program's.
    taken = processors(waiting_seconds=0.8, machine_busy_seconds=8.8)
    waiting = ranks(data_seconds=[0.15] * COUNT, phase_seconds={}, processors=taken)
    assert "slow-data" not in {finding.id for finding in found(run(ranks=waiting))}


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
    return told([record], "faster-than-possible", "inconsistent-timing", "work-outside-clock")


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
