import gc
import json
import shutil
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record.store import Store, keep_runs, read_record, read_runs, without_collection, write_record
from tests.records import make_record


def saved(root: Path, name: str, **changes: object) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    return write_record(directory, make_record(run_id=name, **changes))


def edited(tmp_path: Path, **changes: object) -> Path:
    path = saved(tmp_path, "run")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_record_survives_writing_and_reading(tmp_path: Path) -> None:
    record = make_record(label="zero3:offload=cpu", status="diverged", reasons=["a", "b"])
    assert read_record(write_record(tmp_path, record)) == record


def test_writing_leaves_the_record_alone_in_its_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, "run")
    write_record(path.parent, make_record(run_id="again"))
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]
    assert read_record(path).run_id == "again"


def test_failed_write_keeps_the_former_record(tmp_path: Path) -> None:
    path = saved(tmp_path, "run")
    with pytest.raises(OSError, match="directory"):
        write_record(path, make_record())
    assert read_record(path).run_id == "run"


@pytest.mark.parametrize("version", [0, 1, 3, "1"])
def test_another_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    with pytest.raises(HarnessError, match=f"has schema version {version}; this harness reads 2 only"):
        read_record(edited(tmp_path, schema_version=version))


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"loss": 1.0}')
    with pytest.raises(HarnessError, match="is not a record of this harness: it has no schema_version"):
        read_record(path)
    assert path.read_text() == '{"loss": 1.0}'


def test_a_number_beyond_every_float_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="has a number of 400 digits"):
        read_record(edited(tmp_path, repeat=10**399))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_of_json_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(HarnessError, match=f"it has {json.dumps(value)}, which is no number of JSON"):
        read_record(edited(tmp_path, repeat=value))


def test_a_message_of_somebody_s_record_is_capped_and_may_hold_any_word(tmp_path: Path) -> None:
    error = {"kind": "ValueError", "message": "loss: NaN, -Infinity " + "x" * 10**6}
    record = read_record(edited(tmp_path, error=error))
    assert record.error is not None
    assert record.error.message.startswith("loss: NaN, -Infinity x")
    assert len(record.error.message) < 20_000


def test_unknown_key_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="not valid: 'no_such_key' is unknown"):
        read_record(edited(tmp_path, no_such_key=1))


def test_wrong_value_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="not valid: 'status' was given 'splendid'"):
        read_record(edited(tmp_path, status="splendid"))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"record"', "{}", "\u0000"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(HarnessError, match=r"record\.json"):
        read_record(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match="cannot be read"):
        read_record(path)


def test_records_come_oldest_first_and_unfinished_runs_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, "b", created_at="2026-01-01")
    saved(tmp_path, "a", created_at="2026-01-02")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    records, problems = Store(tmp_path).records()
    assert [record.run_id for record in records] == ["b", "a"]
    assert len(problems) == 1
    assert "broken" in problems[0]


def test_runs_are_read_from_files_folders_and_folders_of_runs_once(tmp_path: Path) -> None:
    first = saved(tmp_path, "a")
    saved(tmp_path, "b")
    for paths in ([first, tmp_path], [first.parent, tmp_path], [first, first.parent, tmp_path]):
        assert [record.run_id for _, record in read_runs(paths)[0]] == ["a", "b"]


def test_the_search_for_garbage_goes_on_after_reading(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    read_runs([tmp_path])
    assert gc.isenabled()
    with without_collection():
        read_runs([tmp_path])
        assert not gc.isenabled()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_records_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError, match=f"{name}' holds no record"):
        read_runs([tmp_path / name])


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="cannot be written"):
        Store(tmp_path / "file" / "runs").prepare()


def test_preparing_leaves_an_empty_folder(tmp_path: Path) -> None:
    Store(tmp_path / "a" / "runs").prepare()
    assert list((tmp_path / "a" / "runs").iterdir()) == []


def test_a_run_folder_is_never_shared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.run_directory("run")
    with pytest.raises(FileExistsError):
        store.run_directory("run")


def test_discarded_run_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.run_directory("run") / "rank-00000.log").write_text("x")
    store.discard("run")
    assert list(tmp_path.iterdir()) == []


def test_kept_records_are_exactly_those_and_outlive_the_run_folders(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two", "three"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record = make_record(run_id=name)
        runs.append((write_record(tmp_path / "runs" / name, record), record))
    folder = tmp_path / "report.md.runs"
    keep_runs(runs[:2], folder)
    kept = keep_runs(runs[1:], folder)
    assert [path for path, _ in kept] == [folder / name / "record.json" for name in ("two", "three")]
    assert sorted(path.parent.name for path in folder.glob("*/record.json")) == ["three", "two"]
    assert sorted(path.name for path in folder.iterdir()) == ["three", "two"]
    before = runs[1][0].read_bytes()
    shutil.rmtree(tmp_path / "runs")
    assert kept[0][0].read_bytes() == before
