"""Real runs with traced steps: phases, overlap and probes; their traces, read as those of other programs."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.forms.terms import STEP_PHASES
from harness.judge import quantities
from harness.judge.quantities import Run
from harness.record import Record
from harness.traces.analysis import RankTrace, read_traces, skew_of
from harness.traces.strategy import likeness_of
from tests.harness.cli.command_line import SMALL, harness, records
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=12)

SETTINGS = (
    "training.steps=8", "measure.warmup_steps=2", "measure.traced_steps=2", "measure.matmul_peak=true",
    "measure.trace=true", "training.gradient_clipping=null",
)  # fmt: skip
LOOKS_LIKE = {
    "ddp": "DDP",
    "fsdp": "FSDP2 full shard",
    "zero3": "ZeRO-3 or FSDP full shard",
}
Bytes = dict[tuple[int, str, str], int]


class Traced(NamedTuple):
    """A run and what its traces were read as, once."""

    label: str
    record: Record
    files: list[Path]
    ranks: list[RankTrace]


@pytest.fixture(scope="module", params=["fsdp", *cheap([], ["ddp"]), *first([], ["zero3"])])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp(request.param)
    assignments = [part for setting in SETTINGS for part in ("--set", setting)]
    done = harness("run", "--backend", request.param, "--nproc", "2", *SMALL, *assignments, cwd=folder)
    assert done.returncode == 0, done.stderr
    (record,) = records(folder / "runs")
    assert [(part.kind, part.rank) for part in record.artifacts] == [("trace", 0), ("trace", 1)]
    files = [folder / "runs" / record.run_id / artifact.path for artifact in record.artifacts]
    return Traced(request.param, record, files, read_traces(files))


def test_every_rank_divides_each_traced_step(traced: Traced) -> None:
    windows = [step.window for step in traced.record.steps]
    assert windows == ["warmup"] * 2 + ["probed"] * 2 + ["traced"] * 2 + ["timed"] * 2
    for rank in traced.record.ranks:
        assert [part.step for part in rank.overlap] == [4, 5]
        for part in rank.overlap:
            whole = part.compute_seconds + part.exposed_seconds + part.idle_seconds
            assert whole == pytest.approx(part.seconds)
            assert 0 < part.compute_seconds < part.seconds
            assert 0 < part.communication_seconds < part.seconds
            assert part.exposed_seconds <= part.communication_seconds
            # It begins before the step's clock and ends after it, by a clock of its own.
            assert part.seconds >= 0.99 * rank.step_seconds[part.step]


def test_reductions_are_seen_in_the_backward_pass(traced: Traced) -> None:
    waits = {(w.name, w.phase) for rank in traced.record.ranks for part in rank.overlap for w in part.waits}
    assert ("gloo:all_reduce", "backward") in waits


def test_phases_and_fetching_fill_the_step(traced: Traced) -> None:
    found = Run.of(traced.record).timings
    assert found.phases is not None
    parts = found.phases + found.data
    assert (parts <= found.steps).all()
    assert (parts / found.steps).max() > 0.9  # where no other process came between


def test_the_trace_of_each_rank_names_steps_and_phases(traced: Traced) -> None:
    for path in traced.files:
        with gzip.open(path) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"harness::step 4", "harness::step 5", "harness::phase forward", "gloo:all_reduce"} <= names


def test_each_probe_says_what_it_cost_and_none_is_at_work_in_timed_steps(traced: Traced) -> None:
    for rank in traced.record.ranks:
        assert {"counter", "memory_walk", "tracer"} <= set(rank.probe_seconds)
        assert all(seconds > 0 for seconds in rank.probe_seconds.values())
        assert rank.timed_probes == []


def test_utilisation_is_below_the_measured_peak(traced: Traced) -> None:
    record = traced.record
    assert quantities.sheet_rate(record) is None
    share = quantities.share_of(
        quantities.model_flops_per_second(Run.of(record)), quantities.measured_rate(record)
    )
    assert share is not None
    assert 0 < share < 1


def test_a_trace_without_traced_steps_is_refused(tmp_path: Path) -> None:
    settings = ("--set", "measure.trace=true", "--set", "measure.traced_steps=0")
    done = harness("run", "--backend", "ddp", *settings, cwd=tmp_path)
    assert done.returncode == 1
    assert "`trace` needs `traced_steps` of at least 1" in done.stderr


def counted(record: Record) -> Bytes:
    """Payload of one step by rank, collective and dtype, as the record's counter saw it in a probed step."""
    found: Counter[tuple[int, str, str]] = Counter()
    for row in record.comm:
        if row.phase in STEP_PHASES and row.group_size > 1 and row.payload_bytes:
            found[row.rank, row.op, row.dtype] += row.payload_bytes // record.windows.probed
    return dict(found)


def of_step(ranks: list[RankTrace], step: int) -> Bytes:
    found: Counter[tuple[int, str, str]] = Counter()
    for rank in ranks:
        for call in rank.calls:
            if call.step == step and call.group.size != 1 and call.payload_bytes != 0:
                assert None not in (call.operation, call.dtype, call.payload_bytes), call
                found[rank.rank or 0, call.operation or "", call.dtype or ""] += call.payload_bytes or 0
    return dict(found)


def test_bytes_are_those_of_the_collective_counter(traced: Traced) -> None:
    label, record, _, ranks = traced
    assert [rank.rank for rank in ranks] == [0, 1]
    for step in (4, 5):
        assert of_step(ranks, step) == counted(record)
    assert {likeness_of(rank).strategy for rank in ranks} == {LOOKS_LIKE[label]}
    # Every collective has the work of gloo that did it.
    assert all(call.runs for rank in ranks for call in rank.calls if call.operation != "barrier")
    skew = skew_of(ranks)
    assert skew.matched > 0
    assert not skew.unmatched


def test_steps_divide_as_the_run_itself_divided_them(traced: Traced) -> None:
    for part, rank in zip(traced.record.ranks, traced.ranks, strict=True):
        assert [step.step for step in rank.steps] == [row.step for row in part.overlap]
        for step, row in zip(rank.steps, part.overlap, strict=True):
            for figure in ("seconds", "compute_seconds", "communication_seconds", "exposed_seconds"):
                # Both are of the same events; a trace has them in thousandths of a microsecond.
                assert getattr(step.division, figure) == pytest.approx(getattr(row, figure), abs=2e-5), figure
            assert step.division.copy_seconds is None


def test_the_command_prints_the_same(traced: Traced, tmp_path: Path) -> None:
    done = harness("trace", *traced.files, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert {row["rank"] for row in document["collectives"]} == {0, 1}
    assert len(document["steps"]) == 2 * len(traced.record.ranks[0].overlap)
