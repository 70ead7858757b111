"""Secrets that are planted wherever a user or a library can put one are in no record and no report."""

from pathlib import Path

import pytest

from harness.record import ErrorPart
from harness.record.store import write_record
from harness.tell.report import write_report
from tests.records import ENVIRONMENT, JOB, make_record

PLACES = {
    "address": "http://someone:pla1nted-ADDRESS@host/data.txt",
    "variable": "pla1nted-VARIABLE",
    "setting": "model.arguments={api_key: pla1nted-SETTING}",
    "option": "--hub-token=pla1nted-OPTION",
    "native configuration": "pla1nted-NATIVE",
    "message": "401 for Authorization: Bearer pla1nted-MESSAGE",
    "log": "export WANDB_API_KEY=pla1nted-LOG",
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A sound run and one that failed, with a secret in each place."""
    job = JOB | {"data": JOB["data"] | {"source": "text", "path": PLACES["address"]}}
    environment = ENVIRONMENT | {"variables": {"HF_TOKEN": PLACES["variable"]}}
    command = ["harness", "run", "--set", PLACES["setting"], PLACES["option"]]
    error = ErrorPart(kind="HTTPError", message=PLACES["message"], log_tail=PLACES["log"])
    paths = []
    for name, more in (("sound", {}), ("failed", {"status": "failed", "error": error})):
        record = make_record(
            run_id=name, label="ddp", job=job, environment=environment, command=command, **more
        )
        backend = record.backend.model_copy(
            update={"native_config": {"wandb": {"password": PLACES["native configuration"]}}}
        )
        (tmp_path / "runs" / name).mkdir(parents=True)
        paths.append(write_record(tmp_path / "runs" / name, record.model_copy(update={"backend": backend})))
    return paths


@pytest.mark.parametrize("suffix", ["md", "html", "csv", "json", "tex"])
def test_no_report_and_no_record_has_a_planted_secret(suffix: str, runs: list[Path], tmp_path: Path) -> None:
    from harness.record.store import read_runs

    write_report(read_runs(runs)[0], tmp_path / "reports" / f"out.{suffix}")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert [path.name for path in files if b"pla1nted" in path.read_bytes()] == []


def test_secrets_were_planted(runs: list[Path]) -> None:
    """Each place is in the record, without its secret."""
    text = runs[1].read_text()
    assert text.count("***") >= len(PLACES)
    for word in ("HF_TOKEN", "api_key", "hub-token", "password", "Bearer", "WANDB_API_KEY", "host/data.txt"):
        assert word in text
