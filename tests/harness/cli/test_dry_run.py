"""`harness compare --dry-run`: what would run and why, and nothing runs."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.record import Record
from harness.record.store import write_record
from harness.run_directory.request import RunRequest
from tests.records import make_record

from .command_line import harness

SET = ["compare.noise_runs=false", "training.steps=4"]
SET_WORDS = [word for setting in SET for word in ("--set", setting)]


@pytest.fixture(scope="module")
def cells() -> dict[str, RunRequest]:
    return {cell.backend: cell for cell in plan(load_experiment(None, SET), ["ddp", "zero3"], [2], 1, "cpu")}


def test_what_cannot_run_is_not_counted(tmp_path: Path) -> None:
    done = harness(
        "compare", "--dry-run", "--wide", "--backends", "ddp,trainer-fsdp", "--nproc", "2", *SET_WORDS,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "trainer-fsdp" in line)
    assert "unsupported: accelerate ignores an FSDP plugin" in line
    assert "2 of 3 cells would run" in done.stderr


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("pp:micro_batches=3", "8 samples per micro-step are not whole micro-batches"),
        ("pp:micro_batches=1", "1F1B over 2 stages needs at least 2 micro-batches"),
        ("pp:micro_batches=5,schedule=interleaved", "choose a multiple of 2"),
        ("pp:stages=3", "pipeline 3 does not fit 2 ranks"),
    ],
)
def test_a_pipeline_that_cannot_be_scheduled_is_not_counted(label: str, reason: str, tmp_path: Path) -> None:
    words = ["--backends", label, "--nproc", "2", *SET_WORDS, "--set", "training.global_batch_size=8"]
    done = harness("compare", "--dry-run", "--wide", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert "no prediction" not in done.stderr
    assert "1 of 2 cells would run" in done.stderr


def test_what_does_not_fit_is_said_and_not_counted(tmp_path: Path) -> None:
    """A model of the catalogue that no check of the job has built, in the words of a run's prediction."""
    words = ["--model", "llama-3.1-8b", "--backends", "ddp,fsdp", "--nproc", "2", *SET_WORDS]
    words += [
        "--set",
        "runtime.memory_limit=1GB",
        "--set",
        "training.precision=bf16-mixed",
    ]  # its profile is shipped
    done = harness("compare", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"predicted memory: fsdp on 2 ranks: cannot fit: [\d.]+ GB of 1 GB per rank", done.stderr
    )
    assert "typical error, full training under " in done.stderr
    assert "0 of 3 cells would run" in done.stderr
    found = json.loads(harness("compare", "--dry-run", "--json", *words, cwd=tmp_path).stdout)["cells"]
    assert {cell["prediction"]["verdict"] for cell in found} == {"does not fit"}
    assert all(cell["prediction"]["refused"] and cell["prediction"]["typical_error"] for cell in found)
    forced = harness("compare", "--dry-run", "--force", *words, cwd=tmp_path)
    assert "3 of 3 cells would run" in forced.stderr


def test_why_nothing_is_predicted_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    setting = ["--set", "model.factory=own.py:build"]
    done = harness(
        "compare",
        "--dry-run",
        "--json",
        "--backends",
        "ddp",
        "--nproc",
        "2",
        *SET_WORDS,
        *setting,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (found, *_) = json.loads(done.stdout)["cells"]
    assert found["prediction"] is None
    assert "there is no file" in found["no_prediction"]


def recorded(cell: RunRequest, /, **changes: object) -> Record:
    """A record of a cell as a run of it leaves it."""
    record = make_record(
        run_id=f"run-{cell.backend}", label=cell.backend, cell=cell.key, job_id=cell.job_id,
        repeat=cell.repeat, measure=cell.measure.model_dump(),
    )  # fmt: skip
    return record.model_copy(update={"job": cell.job, **changes})


def dry_run(folder: Path, *records: Record, settings: list[str] = SET) -> dict[str, dict]:
    for record in records:
        run = folder / "runs" / record.run_id
        run.mkdir(parents=True)
        write_record(run, record)
    before = sorted((folder / "runs").iterdir()) if records else []
    given = [word for setting in settings for word in ("--set", setting)]
    done = harness(
        "compare", "--dry-run", "--json", "--backends", "ddp,zero3", "--nproc", "2", *given, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert (sorted((folder / "runs").iterdir()) if records else []) == before
    return {cell["backend"]: cell for cell in json.loads(done.stdout)["cells"]}


def test_cells_with_a_record_are_named_and_the_others_have_a_reason(tmp_path: Path, cells: dict) -> None:
    found = dry_run(tmp_path, recorded(cells["ddp"]))
    assert (found["ddp"]["run_id"], found["ddp"]["why"]) == ("run-ddp", None)
    assert (found["zero3"]["run_id"], found["zero3"]["why"]) == (None, "never ran in this folder")


def test_an_empty_folder_is_not_created_and_times_are_marked_as_estimates(tmp_path: Path) -> None:
    found = dry_run(tmp_path)
    assert {cell["seconds_from"] for cell in found.values()} == {"flops"}
    assert all(5 < cell["seconds"] < 60 for cell in found.values())
    assert not (tmp_path / "runs").exists()
    done = harness("compare", "--dry-run", "--backends", "ddp", cwd=tmp_path)
    assert "  ~" in done.stdout
    assert "~: estimated from the model's FLOPs" in done.stderr


def test_a_job_whose_flops_are_not_known_has_no_estimate(tmp_path: Path) -> None:
    found = dry_run(tmp_path, settings=[*SET[:1], "training.epochs=1"])
    assert {(cell["seconds"], cell["seconds_from"]) for cell in found.values()} == {(None, None)}


def test_like_runs_give_the_estimate_where_there_are_some(tmp_path: Path, cells: dict) -> None:
    found = dry_run(tmp_path, recorded(cells["ddp"], created_at=datetime.now(UTC).isoformat()))
    assert found["zero3"]["seconds_from"] == "runs"


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("training.steps=5", "another job: training.steps"),
        ("measure.probed_steps=1", "measured with other settings: measure.probed_steps"),
    ],
)
def test_the_setting_that_differs_is_named(tmp_path: Path, cells: dict, setting: str, why: str) -> None:
    assert dry_run(tmp_path, recorded(cells["ddp"]), settings=[*SET, setting])["ddp"]["why"] == why


def test_a_failed_run_does_not_count(tmp_path: Path, cells: dict) -> None:
    found = dry_run(tmp_path, recorded(cells["ddp"], status="failed"))
    assert found["ddp"]["why"] == "the last run is failed"


def test_other_code_is_a_reason(tmp_path: Path, cells: dict) -> None:
    record = recorded(cells["ddp"], cell="of other code")
    same = record.backend.model_copy(update={"versions": {}})
    why = dry_run(tmp_path, record.model_copy(update={"backend": same}))["ddp"]["why"]
    assert why == "code, machine, device or threads changed"
