import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.record.schema1 import from_schema_1
from harness.record.store import parse_record, read_record, write_record

PUBLISHED = Path(__file__).with_name("schema_1.json")
"""A published record of version 1, shortened: fewer steps, tensors and collectives."""


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_a_record_of_version_1_is_read_under_the_names_of_version_2(document: dict[str, Any]) -> None:
    record = read_record(PUBLISHED)
    assert record.schema_version == 2
    assert (record.backend.label, record.backend.options["master_dtype"]) == (
        "fsdp:master_dtype=compute",
        "compute",
    )
    assert [step.sample_hashes for step in record.steps] == [step["ledger"] for step in document["steps"]]
    windows = {"counted": "probed", "settling": "cooldown"}
    assert [step.window for step in record.steps] == [
        windows.get(step["window"], step["window"]) for step in document["steps"]
    ]
    assert {"probed", "cooldown"} <= {step.window for step in record.steps}
    for rank, old in zip(record.ranks, document["ranks"], strict=True):
        assert rank.sample_hashes == old["ledger"]
        assert rank.batch_digests == old["fed"]
        assert rank.batch_hash_sums == old["fed_sums"]
    assert record.windows is not None
    assert (record.windows.probed, record.windows.cooldown) == (
        document["windows"]["counted"],
        document["windows"]["settling"],
    )
    assert record.measure is not None
    assert (record.measure.probed_steps, record.measure.cooldown_steps) == (
        document["measure"]["counted_steps"],
        document["measure"]["settling_steps"],
    )


def test_a_record_of_version_1_keeps_its_job_and_is_written_as_version_2(tmp_path: Path) -> None:
    record = read_record(PUBLISHED)
    assert record.job.job_id() == record.job_id
    again = read_record(write_record(tmp_path, record))
    assert again == record


def test_only_names_change(document: dict[str, Any]) -> None:
    before = json.dumps(document, sort_keys=True)
    upgraded = from_schema_1(document)
    assert json.dumps(document, sort_keys=True) == before
    same = document.keys() - {"schema_version", "steps", "ranks", "windows", "measure", "backend"}
    assert {key: upgraded[key] for key in same} == {key: document[key] for key in same}
    for part, renamed in (("steps", {"ledger", "window"}), ("ranks", {"ledger", "fed", "fed_sums"})):
        for old, new in zip(document[part], upgraded[part], strict=True):
            assert len(new) == len(old)
            assert {key: new[key] for key in old.keys() - renamed} == {
                key: old[key] for key in old.keys() - renamed
            }


def test_a_newer_version_is_refused_by_one_line_that_names_both(document: dict[str, Any]) -> None:
    newer = json.dumps(document | {"schema_version": 3}).encode()
    with pytest.raises(HarnessError) as refused:
        parse_record(newer, Path("record.json"))
    assert str(refused.value) == "record record.json has schema version 3; this harness reads 1 and 2"


def test_a_damaged_record_of_version_1_says_where(document: dict[str, Any]) -> None:
    document["steps"][0]["window"] = "other"
    with pytest.raises(HarnessError, match=r"steps.*window"):
        parse_record(json.dumps(document).encode(), Path("record.json"))
    with pytest.raises(HarnessError, match="cannot be read"):
        parse_record(PUBLISHED.read_bytes()[:-100], Path("record.json"))


def test_a_job_that_a_later_version_would_refuse_is_read(document: dict[str, Any]) -> None:
    document["job"]["training"]["precision"] = "fp8-mixed"
    document["measure"]["counted_steps"] = -1
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


def test_artifacts_that_were_named_in_words_are_read_as_parts(document: dict[str, Any]) -> None:
    document["artifacts"] = {
        "trace of rank 1": "trace-00001.json.gz",
        "memory snapshot of rank 0": "memory-snapshot-00000.pickle",
        "checkpoint": "checkpoint",
    }
    record = parse_record(json.dumps(document).encode(), Path("record.json"))
    assert [(part.kind, part.rank, part.path) for part in record.artifacts] == [
        ("trace", 1, "trace-00001.json.gz"),
        ("memory snapshot", 0, "memory-snapshot-00000.pickle"),
        ("checkpoint", None, "checkpoint"),
    ]
    document["artifacts"] = {"pictures of rank one": "x"}
    with pytest.raises(HarnessError, match="artifacts"):
        parse_record(json.dumps(document).encode(), Path("record.json"))
