"""A real run on two ranks with a traced step: phases, overlap, the trace, the probes and the matmul peak."""

import gzip
import json
from pathlib import Path

import pytest

from harness.judge import quantities
from harness.judge.quantities import Run, timings
from harness.record import Record
from tests.harness.cli.command_line import SMALL, harness, records


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    folder = tmp_path_factory.mktemp("traced")
    settings = (
        "training.steps=8",
        "measure.warmup_steps=2",
        "measure.traced_steps=2",
        "measure.matmul_peak=true",
    )
    assignments = [part for setting in settings for part in ("--set", setting)]
    command = ["run", "--backend", "ddp", "--nproc", "2", "--set", "measure.trace=true", *SMALL, *assignments]
    done = harness(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    (record,) = records(folder / "runs")
    return folder / "runs" / record.run_id, record


def test_windows_follow_each_other(traced: tuple[Path, Record]) -> None:
    windows = [step.window for step in traced[1].steps]
    assert windows == ["warmup"] * 2 + ["probed"] * 2 + ["traced"] * 2 + ["timed"] * 2


def test_every_rank_divides_each_traced_step(traced: tuple[Path, Record]) -> None:
    for rank in traced[1].ranks:
        assert [part.step for part in rank.overlap] == [4, 5]
        for part in rank.overlap:
            whole = part.compute_seconds + part.exposed_seconds + part.idle_seconds
            assert whole == pytest.approx(part.seconds)
            assert 0 < part.compute_seconds < part.seconds
            assert 0 < part.communication_seconds < part.seconds
            assert part.exposed_seconds <= part.communication_seconds
            # It begins before the step's clock and ends after it, by a clock of its own.
            assert part.seconds >= 0.99 * rank.step_seconds[part.step]


def test_the_reducer_of_ddp_is_seen_in_the_backward_pass(traced: tuple[Path, Record]) -> None:
    waits = {(w.name, w.phase) for rank in traced[1].ranks for part in rank.overlap for w in part.waits}
    assert ("gloo:all_reduce", "backward") in waits


def test_phases_and_fetching_fill_the_step(traced: tuple[Path, Record]) -> None:
    found = timings(traced[1])
    assert found is not None
    assert found.phases is not None
    parts = found.phases + found.data
    assert (parts <= found.steps).all()
    assert (parts / found.steps).max() > 0.9  # where no other process came between


def test_the_trace_of_each_rank_opens_and_is_named_in_the_record(traced: tuple[Path, Record]) -> None:
    folder, record = traced
    assert [(part.kind, part.rank) for part in record.artifacts] == [("trace", 0), ("trace", 1)]
    for name in (part.path for part in record.artifacts):
        with gzip.open(folder / name) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"harness::step 4", "harness::step 5", "harness::phase forward", "gloo:all_reduce"} <= names


def test_each_probe_says_what_it_cost_and_none_is_at_work_in_timed_steps(traced: tuple[Path, Record]) -> None:
    for rank in traced[1].ranks:
        assert {"counter", "memory_walk", "tracer"} <= set(rank.probe_seconds)
        assert all(seconds > 0 for seconds in rank.probe_seconds.values())
        assert rank.timed_probes == []


def test_utilisation_is_below_the_measured_peak(traced: tuple[Path, Record]) -> None:
    record = traced[1]
    assert quantities.sheet_peak(record) is None
    share = quantities.share_of(
        quantities.model_flops_per_second(Run.of(record)), quantities.measured_peak(record)
    )
    assert share is not None
    assert 0 < share < 1


def test_a_trace_without_traced_steps_is_refused(tmp_path: Path) -> None:
    done = harness(
        "run",
        "--backend",
        "ddp",
        "--set",
        "measure.trace=true",
        "--set",
        "measure.traced_steps=0",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "`trace` needs `traced_steps` of at least 1" in done.stderr
