"""Runs that would not have the memory are not started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.launch.cells import is_refused
from harness.record import Record
from tests.harness.cli.command_line import SHORT, harness, records, refused

LIMIT = "runtime.memory_limit"
LIMIT_BYTES = "1800000"
"""Between what DDP and FSDP need."""


def compare(folder: Path, limit: str, *arguments: str) -> tuple[str, dict[str, dict], list[Record]]:
    """Standard error, rows of `compare --json` and the records; `fsdp` fits where `ddp` does not."""
    done = harness(
        "compare", "--json", "--backends", "ddp,fsdp", "--nproc", "2", "--runs", "runs", *SHORT,
        "--set", f"{LIMIT}={limit}", "--set", "compare.noise_runs=false", *arguments, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["backend"]: row for row in json.loads(done.stdout)["rows"]}
    return done.stderr, rows, records(folder / "runs")


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict], list[Record], Path]:
    folder = tmp_path_factory.mktemp("between")
    return *compare(folder, LIMIT_BYTES), folder


def test_a_run_that_cannot_fit_is_one_line(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--nproc", "2", *SHORT, "--set", f"{LIMIT}=10kB")
    assert "ddp on 2 ranks: cannot fit: " in line
    assert "of 0.01 MB per rank; --force starts it anyway" in line
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_model_of_ones_own_whose_states_cannot_fit_is_refused(tmp_path: Path) -> None:
    words = ("--set", f"{LIMIT}=10kB", "--set", "compare.backends=[ddp]")
    line = refused(tmp_path, "run", "--backend", "ddp", "--nproc", "2", "--config", "@own-model", *words)
    assert "ddp on 2 ranks: cannot fit: at least " in line
    assert list((tmp_path / "runs").iterdir()) == []


def test_cells_that_cannot_fit_are_listed_and_the_others_run(between) -> None:
    shown, rows, _, _ = between
    assert "predicted memory: fsdp on 2 ranks: " in shown
    assert "predicted memory: ddp on 2 ranks: cannot fit: " in shown
    assert {name: row["status"] for name, row in rows.items()} == {
        "single": "unsupported", "ddp": "unsupported", "fsdp": "ok",
    }  # fmt: skip
    assert rows["ddp"]["reason"].startswith("cannot fit: ")


def test_the_record_holds_the_prediction_and_that_it_was_refused(between) -> None:
    _, rows, found, _ = between
    for record in found:
        assert record.prediction is not None
        assert record.prediction.device_limit_bytes == record.world.memory_limit_bytes
        assert is_refused(record) == (record.backend.label != "fsdp")
        assert rows[record.backend.label]["predicted_peak_bytes"] == record.prediction.peak_bytes
        assert bool(record.ranks) != is_refused(record)


def test_refused_cells_are_judged_again_and_have_one_record(between) -> None:
    _, rows, before, folder = between
    shown, again, found = compare(folder, LIMIT_BYTES)
    assert "1 of 3 cells have a record" in shown
    assert len(found) == len(before)
    assert again["fsdp"]["run_id"] == rows["fsdp"]["run_id"]
    assert again["ddp"]["run_id"] != rows["ddp"]["run_id"]


@pytest.mark.costly
def test_a_rank_of_torchrun_that_cannot_fit_refuses_before_it_meets_the_others(tmp_path: Path) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", *SHORT, "--set", f"{LIMIT}=10kB", RANK="0", LOCAL_RANK="0",
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9",
    )  # fmt: skip
    assert "ddp on 2 ranks: cannot fit: " in line
    assert list((tmp_path / "runs").iterdir()) == []
