"""Records of long runs on many ranks stay small and lose nothing that a rank wrote."""

import json
from pathlib import Path

import pytest

from benchmarks.scaled_run import scale_run
from harness.record import Record
from harness.record.store import read_record, write_record
from harness.run_directory.assemble import Outcome, assemble
from harness.run_directory.request import RunRequest, rank_file
from tests.harness.cli.command_line import harness, succeeds

pytestmark = [pytest.mark.long(seconds=10), pytest.mark.costly]

RANKS = 64
STEPS = 1000
MOST_BYTES_PER_RANK_AND_STEP = 200
"""With what a record has besides, this keeps 64 ranks x 1,000 steps well under 20 MB."""
SMALL = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}",
    "data.sequence_length=16", "data.limit=64", "training.steps=8", "runtime.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRequest]:
    """Events of 64 ranks x 1,000 steps, from those of a small real run."""
    folder = tmp_path_factory.mktemp("long")
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    succeeds("run", "--backend", "ddp", "--nproc", "2", *settings, "--runs", "runs", cwd=folder)
    (source,) = (folder / "runs").iterdir()
    target = folder / "scaled"
    target.mkdir()
    return target, scale_run(source, target, RANKS, STEPS)


@pytest.fixture(scope="module")
def record(scaled: tuple[Path, RunRequest]) -> Record:
    return assemble(*scaled, Outcome(exit_codes=dict.fromkeys(range(RANKS), 0)))


def test_a_record_of_64_ranks_and_1000_steps_is_small(record: Record, tmp_path: Path) -> None:
    path = write_record(tmp_path, record)
    assert (record.status, len(record.ranks), len(record.steps)) == ("ok", RANKS, STEPS)
    assert path.stat().st_size < MOST_BYTES_PER_RANK_AND_STEP * RANKS * STEPS < 20e6
    assert read_record(path) == record


def test_it_holds_every_figure_of_every_step_and_rank(
    record: Record, scaled: tuple[Path, RunRequest]
) -> None:
    rank = record.ranks[RANKS - 1]
    lines = rank_file(scaled[0], RANKS - 1).read_text(encoding="utf-8").splitlines()
    steps = [event for line in lines if (event := json.loads(line))["kind"] == "step"]
    assert rank.loss_sums == [step["loss_sum"] for step in steps]
    assert rank.sample_hashes == [step["sample_hashes"] for step in steps]
    assert rank.batch_hash_sums == [step["batch_hash_sum"] for step in steps]
    assert rank.gradient_norms == [step["gradient_norm"] for step in steps]
    assert rank.step_seconds == [round(step["seconds"], 9) for step in steps]


def test_it_is_shown(record: Record, tmp_path: Path) -> None:
    done = harness("show", write_record(tmp_path, record), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "64 on 1 node(s)" in done.stdout


def test_each_part_has_a_line_of_its_own(record: Record, tmp_path: Path) -> None:
    lines = write_record(tmp_path, record).read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('{"step":') for line in lines) == STEPS
    assert sum(line.startswith('{"rank":') and '"step_seconds"' in line for line in lines) == RANKS
