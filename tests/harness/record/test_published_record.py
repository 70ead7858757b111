import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.record.store import parse_record, read_record, write_record

PUBLISHED = Path(__file__).with_name("published.json")
"""A record of an earlier commit, shortened: fewer steps, tensors and collectives."""


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_a_record_of_an_earlier_commit_keeps_its_job_and_is_written_as_it_was(tmp_path: Path) -> None:
    record = read_record(PUBLISHED)
    assert record.job.job_id() == record.job_id
    assert read_record(write_record(tmp_path, record)) == record


def test_a_damaged_record_says_where(document: dict[str, Any]) -> None:
    document["steps"][0]["window"] = "other"
    with pytest.raises(HarnessError, match=r"steps.*window"):
        parse_record(json.dumps(document).encode(), Path("record.json"))
    with pytest.raises(HarnessError, match="cannot be read"):
        parse_record(PUBLISHED.read_bytes()[:-100], Path("record.json"))


def test_a_job_that_a_later_version_would_refuse_is_read(document: dict[str, Any]) -> None:
    document["job"]["training"]["precision"] = "fp8-mixed"
    document["measure"]["probed_steps"] = -1
    record = parse_record(json.dumps(document).encode(), Path("record.json"))
    assert record.job.training.precision == "fp8-mixed"
    assert record.job.model.dropout == document["job"]["model"]["dropout"]
    assert record.measure is not None
    assert record.measure.probed_steps == -1


def test_an_unknown_setting_of_a_job_is_refused(document: dict[str, Any]) -> None:
    document["job"]["training"]["momentum"] = 0.9
    with pytest.raises(HarnessError, match=r"training.*momentum|momentum"):
        parse_record(json.dumps(document).encode(), Path("record.json"))


def test_what_only_a_third_party_knows_is_among_the_details(document: dict[str, Any]) -> None:
    document["backend"]["effective"]["pipeline_depth"] = 4
    record = parse_record(json.dumps(document).encode(), Path("record.json"))
    assert record.backend.effective is not None
    assert record.backend.effective.details["pipeline_depth"] == 4
