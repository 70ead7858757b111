"""A record that could not be written is written by the next command, and ranks leave no large files."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.launch import launcher as cells
from harness.launch.cells import plan
from harness.launch.launcher import run_cell
from harness.launch.owner import OWNER_NAME, made_in_job, record_abandoned, requeued_job
from harness.record.store import Store
from harness.run_directory.request import RunRequest, checkpoint_folder, weights_folder
from tests.fake_ranks import FakeLauncher, Rank
from tests.records import ENVIRONMENT, make_record


def leave(rank: Rank) -> None:
    rank.train()
    for folder in (weights_folder(rank.log.parent), checkpoint_folder(rank.log.parent)):
        folder.mkdir(exist_ok=True)
    rank.fail(kind="OSError", message="planted")


@pytest.fixture
def cell() -> RunRequest:
    experiment = Experiment()
    return next(c for c in plan(experiment, ["ddp"], [2], 1, "cpu") if c.backend == "ddp")


def run(cell: RunRequest, store: Store) -> Any:
    launcher = FakeLauncher({0: leave, 1: leave})
    return run_cell(cell, store, launcher, command=["harness"])


def test_failed_run_leaves_neither_weights_nor_checkpoint(tmp_path: Path, cell: RunRequest) -> None:
    record = run(cell, Store(tmp_path))
    assert record.status == "failed"
    folder = tmp_path / record.run_id
    assert not weights_folder(folder).exists()
    assert not checkpoint_folder(folder).exists()
    assert not (folder / OWNER_NAME).exists()


def test_record_that_could_not_be_written_says_later_how_the_ranks_ended(
    tmp_path: Path, cell: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cells, "keep_record", full)
        with pytest.raises(HarnessError, match="cannot be written: No space left on device"):
            run(cell, Store(tmp_path))
    (note,) = tmp_path.glob(f"*/{OWNER_NAME}")
    text = note.read_text()
    assert len(text) == 4096  # what was there has been overwritten, so that no new block was needed
    note.write_text(text.replace('"process":', '"process":999999', 1))  # its launcher is gone
    (record,) = record_abandoned(tmp_path)
    assert (record.status, record.error.kind, record.error.exit_code) == ("failed", "OSError", 1)
    assert not note.exists()


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7"),
    ],
)
def test_only_a_job_that_was_started_again_is_requeued(
    variables: dict[str, str], job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert requeued_job() == job


def test_records_of_other_jobs_are_not_taken_over() -> None:
    records = [
        make_record(run_id=name, environment=ENVIRONMENT | {"variables": variables})
        for name, variables in (
            ("own", {"SLURM_JOB_ID": "7"}), ("another", {"SLURM_JOB_ID": "8"}), ("none", {})
        )
    ]  # fmt: skip
    assert [record.run_id for record in records if made_in_job(record, "7")] == ["own"]
