"""Traces of real ranks over gloo: their collectives are those that the record counted."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.forms.terms import STEP_PHASES
from harness.record import Record
from harness.traces.analysis import RankTrace, likeness_of, read_traces, skew_of
from tests.harness.cli.command_line import SMALL, harness, records
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=10)

SETTINGS = (
    "training.steps=6", "measure.warmup_steps=2", "measure.probed_steps=1", "measure.traced_steps=2",
    "training.gradient_clipping=null",
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
    command = [
        "run",
        "--backend",
        request.param,
        "--nproc",
        "2",
        "--set",
        "measure.trace=true",
        *SMALL,
        *assignments,
    ]
    done = harness(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    (record,) = records(folder / "runs")
    kept = [artifact for artifact in record.artifacts if artifact.kind == "trace"]
    files = [folder / "runs" / record.run_id / artifact.path for artifact in kept]
    return Traced(request.param, record, files, read_traces(files))


def counted(record: Record) -> Bytes:
    """Payload of one step by rank, collective and dtype, as the record's counter saw it in a probed step."""
    assert record.windows is not None
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
    for step in (3, 4):
        assert of_step(ranks, step) == counted(record)
    assert {likeness_of(rank).strategy for rank in ranks} == {LOOKS_LIKE[label]}
    # Every collective has the work of gloo that did it.
    assert all(call.runs for rank in ranks for call in rank.calls if call.operation != "barrier")
    skew = skew_of(ranks)
    assert skew is not None
    assert skew.matched > 0
    assert not skew.unmatched


def test_steps_divide_as_the_run_itself_divided_them(traced: Traced) -> None:
    for part, rank in zip(traced.record.ranks, traced.ranks, strict=True):
        assert [step.step for step in rank.steps] == [row.step for row in part.overlap]
        for step, row in zip(rank.steps, part.overlap, strict=True):
            assert step.division is not None
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
