"""Settings of recorded runs: those that were not seen of a script are null, whatever their type."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.errors import HarnessError
from harness.job.job import Job
from harness.judge.comparison import Comparison
from harness.record import ObservationPart, Record
from harness.record.run import seen_job
from harness.record.store import read_record
from harness.tell.report import details_document
from tests.records import make_model, make_record

PART = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")


def observed(job: Job) -> Record:
    changes: dict[str, Any] = {"job": job, "observation": PART, "model": make_model()}
    return make_record(label="observed-ddp").model_copy(update=changes)


def written(folder: Path, record: Record) -> Path:
    folder.mkdir(parents=True)
    path = folder / "record.json"
    path.write_text(record.model_dump_json())
    return path


def test_a_record_of_which_no_setting_was_seen_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = observed(seen_job({}))
    read = read_record(written(tmp_path / "run", record))
    assert read.model_dump() == record.model_dump()
    sections = [v for v in read.job.model_dump().values() if isinstance(v, dict)]
    assert {value for values in sections for value in values.values() if not isinstance(value, dict)} == {
        None
    }


@pytest.mark.parametrize("name", ["md", "html", "csv", "json", "tex"])
def test_every_command_shows_a_record_of_which_no_setting_was_seen(tmp_path: Path, name: str) -> None:
    run = written(tmp_path / "runs" / "one", observed(seen_job({}))).parent
    report = tmp_path / f"report.{name}"
    for command in (
        ["list", "--runs", str(run.parent)],
        ["show", str(run)],
        ["report", str(run.parent), "-o", str(report)],
        ["verify", str(report)],
    ):
        done = CliRunner().invoke(harness, command)
        assert done.exit_code == 0, (command, done.output)


def test_a_setting_of_another_type_is_still_refused(tmp_path: Path) -> None:
    document = observed(seen_job({})).model_dump(mode="json")
    document["job"]["training"]["steps"] = {"a": 1}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(document))
    with pytest.raises(HarnessError, match="setting 'steps' has another type"):
        read_record(path)


def _names() -> list[str]:
    """Every setting of a job."""
    sections = seen_job({}).model_dump().items()
    return [f"{s}.{key}" for s, v in sections if isinstance(v, dict) for key in v] + [
        s for s, v in sections if not isinstance(v, dict)
    ]


def test_each_section_reads_a_record_in_which_one_setting_was_not_seen() -> None:
    known = make_record().job.model_dump()
    for name in _names():
        values = {f"{s}.{k}": v for s, of in known.items() if isinstance(of, dict) for k, v in of.items()}
        values |= {s: v for s, v in known.items() if not isinstance(v, dict)}
        job = seen_job({k: v for k, v in values.items() if k != name})
        details_document(Comparison([observed(job)]))
