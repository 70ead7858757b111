"""Records are written and read back; what is no record, or would lead out of its folder, is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.files import plain_name
from harness.job.job import Job
from harness.judge.comparison import Comparison
from harness.nested import put
from harness.record import ObservationPart, Record
from harness.record.run import seen_job
from harness.record.store import (
    RecordFiles,
    Store,
    as_name,
    keep_runs,
    parse_record,
    read_each,
    read_record,
    read_runs,
    run_folder,
    write_record,
)
from harness.slurm.matrix import read_matrix
from harness.tell.report import details_document
from tests.harness.cli.command_line import refused
from tests.harness.slurm.test_submission import a_matrix
from tests.records import make_communication, make_model, make_ranks, make_record, make_steps, saved, written


def edited(tmp_path: Path, key: str, value: object) -> Path:
    """The file of a record with another value of a dotted key."""
    path = saved(tmp_path, "run")
    document = json.loads(path.read_text())
    put(document, tuple(key.split(".")), value)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(("schema_version", version, f"{version}; this harness reads 2 only: read it with the version that")
          for version in (0, 1, 3)),
        ("schema_version", "2", "has schema version '2', a text; this harness reads 2 only"),
        ("repeat", 10**308, "not valid: 'repeat' has a number of 309 digits"),
        *((key, float(value), f"not valid: has {value} in '{key}', which is no number of JSON")
          for key, value in (("repeat", "NaN"), ("job.training.seed", "Infinity"), ("repeat", "-Infinity"))),
        ("losses", [1.0, float("nan")], "has NaN in 'losses.1'"),
        ("no_such_key", 1, "not valid: 'no_such_key' is unknown"),
        ("ranks", [make_record().ranks[0].model_dump() | {"new": 1}],
         "not valid: 'ranks.0.new' is unknown. Allowed in ranks.0: rank, "),
        ("world.device", "xpu", "'world.device' was given 'xpu': it must be 'cpu' or 'cuda'"),
        ("status", "splendid", "not valid: 'status' was given 'splendid'"),
        ("job.training.momentum", 0.9, "setting 'momentum' is unknown"),
        ("job.training.steps", {"a": 1}, "setting 'steps' has another type"),
        *(("observed", {"optimizer_groups": [{"parameters": names}]}, "must be a list of names")
          for names in (5, [["a"]], {"a": 1})),
        *(("backend", {"label": "zero3", "name": "zero3", "options": {"hpz": value}}, "'hpz' was given")
          for value in ([2], "abc", -2)),
        *((key, -1, f"'{key}' was given -1")
          for key in ("repeat", "skipped_steps", "environment.memory_bytes")),
    ],
)  # fmt: skip
def test_a_value_that_no_record_has_is_refused_by_name(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    with pytest.raises(HarnessError) as caught:
        read_record(edited(tmp_path, key, value))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": [*make_ranks(1), *make_ranks(1)]}, "'ranks' has number 0 after 0"),
        ({"ranks": make_ranks(2)[::-1]}, "'ranks' has number 0 after 1"),
        ({"ranks": make_ranks(3)}, "'ranks' has number 2 after 1"),
        ({"steps": make_steps()[::-1]}, "'steps' has number 2 after 3"),
        ({"comm": make_communication(3)}, "'comm' has number 2 after 1"),
    ],
)
def test_ranks_and_steps_are_those_of_the_run_each_once(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = write_record(tmp_path, make_record(world_size=2, **changes))
    with pytest.raises(HarnessError) as caught:
        read_record(path)
    assert str(caught.value) == f"record {path} is not valid: {said}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((text, "record.json") for text in (b"", b"{", b"[1, 2]", b'"record"', b"{}", b"\0")),
        (b'{"run_id": \xff', "cannot be read"),
        (b"# A report", "is no record, nor JSON: give a run's folder or its record.json"),
        (b'{"loss": 1.0}', "is not a record of this harness: it has no schema_version"),
    ],
)
def test_what_is_no_record_is_refused_and_stays(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(HarnessError) as caught:
        read_record(path)
    assert said in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "written", "said"),
    [
        *((key, r'\1\2,\1"other"', f"gives '{key}' twice") for key in ("status", "run_id", "world_size")),
        ("created_at", r'\1"\\ud800"', "Invalid JSON: "),
    ],
)
def test_what_python_takes_for_json_and_is_none_is_refused(
    tmp_path: Path, key: str, written: str, said: str
) -> None:
    path = saved(tmp_path, "run")
    path.write_text(re.sub(rf'("{key}": ?)([^,}}]+)', written, path.read_text(), count=1))
    with pytest.raises(HarnessError, match=f"record.json is not valid: {said}"):
        read_record(path)


def test_record_survives_writing_and_reading_and_a_failed_write_keeps_it(tmp_path: Path) -> None:
    record = make_record(label="zero3:offload=cpu", status="diverged", reasons=["a", "b"])
    path = write_record(tmp_path, record)
    with pytest.raises(OSError, match="directory"):
        write_record(path, make_record())
    assert read_record(path) == record


def test_a_message_of_somebody_s_record_is_capped_and_may_hold_any_word(tmp_path: Path) -> None:
    error = {"kind": "ValueError", "message": "loss: NaN, -Infinity " + "x" * 10**6}
    record = read_record(edited(tmp_path, "error", error))
    assert record.error.message.startswith("loss: NaN, -Infinity x")
    assert len(record.error.message) < 20_000


def test_records_come_oldest_first_and_unfinished_runs_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, "b", created_at="2026-01-01")
    saved(tmp_path, "a", created_at="2026-01-02")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    records, (problem,) = Store(tmp_path).records()
    assert [record.run_id for record in records] == ["b", "a"]
    assert "broken" in problem


def test_runs_are_read_from_files_folders_and_folders_of_runs_once(tmp_path: Path) -> None:
    first = saved(tmp_path, "a")
    saved(tmp_path, "b")
    for paths in ([first, tmp_path], [first.parent, tmp_path], [first, first.parent, tmp_path]):
        assert [record.run_id for _, record in read_runs(paths)[0]] == ["a", "b"]


@pytest.mark.parametrize("gone", ["a", "copy"])
def test_a_record_that_goes_after_it_was_read_counts_and_its_copy_is_named(tmp_path: Path, gone: str) -> None:
    paths = [saved(tmp_path, "a"), tmp_path / "copy/record.json"]
    shutil.copytree(tmp_path / "a", tmp_path / "copy")

    def read(path: Path, files: RecordFiles) -> Record:
        record = read_record(path, files)
        if path == paths[1]:
            (tmp_path / gone / "record.json").unlink()
        return record

    ((path, _),), (problem,) = read_each(paths, read)
    assert path == paths[0]
    assert problem == (
        f"record {paths[1]} and {paths[0]} cannot be compared: No such file or directory: run a counts once"
    )


@pytest.mark.parametrize(("name", "why"), [("missing", "does not exist"), ("empty", "holds no record")])
def test_a_folder_without_records_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError, match=f"{name}' {why}"):
        read_runs([tmp_path / name])


def test_a_folder_of_runs_is_prepared_and_each_run_has_its_own_in_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "runs")
    store.prepare()
    assert list(store.root.iterdir()) == []
    (store.run_directory("run") / "rank-00000.log").write_text("x")
    with pytest.raises(FileExistsError):
        store.run_directory("run")
    store.discard("run")
    assert list(store.root.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="cannot be written"):
        Store(tmp_path / "file" / "runs").prepare()


def test_kept_records_are_exactly_those_and_outlive_the_run_folders(tmp_path: Path) -> None:
    runs = written(tmp_path / "runs", *(make_record(run_id=name) for name in ("one", "two", "three")))
    folder = tmp_path / "report.md.runs"
    keep_runs(runs[:2], folder)
    kept = keep_runs(runs[1:], folder)
    assert [path for path, _ in kept] == [folder / name / "record.json" for name in ("two", "three")]
    assert sorted(path.parent.name for path in folder.glob("*/record.json")) == ["three", "two"]
    assert sorted(path.name for path in folder.iterdir()) == ["three", "two"]
    before = runs[1][0].read_bytes()
    shutil.rmtree(tmp_path / "runs")
    assert kept[0][0].read_bytes() == before


PUBLISHED = Path(__file__).with_name("published.json")
"""A record of an earlier commit, shortened: fewer steps, tensors and collectives."""


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_a_record_of_an_earlier_commit_keeps_its_job_and_is_written_as_it_was(tmp_path: Path) -> None:
    record = read_record(PUBLISHED)
    assert record.job.job_id() == record.job_id
    assert read_record(write_record(tmp_path, record)) == record


def test_a_record_of_another_version_is_read_with_what_only_it_knows(document: dict[str, Any]) -> None:
    document["job"]["training"]["precision"] = "fp8-mixed"
    document["measure"]["probed_steps"] = -1
    document["backend"]["effective"]["pipeline_depth"] = 4
    record = parse_record(json.dumps(document).encode(), Path("record.json"))
    assert (record.job.training.precision, record.measure.probed_steps) == ("fp8-mixed", -1)
    assert record.job.model.dropout == document["job"]["model"]["dropout"]
    assert record.backend.effective.details["pipeline_depth"] == 4
    document["steps"][0]["window"] = "other"
    for damaged, said in ((json.dumps(document).encode(), r"steps.*window"),
                          (PUBLISHED.read_bytes()[:-100], "cannot be read")):  # fmt: skip
        with pytest.raises(HarnessError, match=said):
            parse_record(damaged, Path("record.json"))


@pytest.mark.parametrize(
    "name",
    [
        "../../x", "/tmp/x", "a/b", "..", ".", "", ".hidden", "a\\b", "nul\0", "two\nlines", "x" * 300,
        "\udc80",
    ],
)  # fmt: skip
def test_run_id_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HarnessError, match="refused as a path"):
        run_folder(tmp_path, name)
    sound = "20260102-030405-zero3-n2-r0-abc"
    assert run_folder(tmp_path, sound) == tmp_path / sound
    assert plain_name(f"n-{as_name('../my backend')}") == "n-.._my_backend"


@pytest.mark.parametrize("name", ["../../planted", "/tmp/planted"])
def test_export_of_a_record_whose_run_id_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    write_record(tmp_path, make_record(run_id=name))
    words = ["export", "tracking", "record.json", "--to", "tensorboard", "-o", "a/b/board"]
    assert "refused as a path" in refused(tmp_path, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(("key", "value"), [("run_id", "../../planted"), ("script", "/tmp/planted.sbatch")])
def test_matrix_whose_names_lead_outside_is_refused(tmp_path: Path, key: str, value: str) -> None:
    folder, _ = a_matrix(tmp_path)
    document = json.loads((folder / "matrix.json").read_text())
    run = document["runs"][0]
    (run["request"] if key == "run_id" else run)[key] = value
    (folder / "matrix.json").write_text(json.dumps(document))
    with pytest.raises(HarnessError, match=f"{key}.*must be the name of one folder or file"):
        read_matrix(folder)


PART = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")


def observed(job: Job) -> Record:
    changes: dict[str, Any] = {"job": job, "observation": PART, "model": make_model()}
    return make_record(label="observed-ddp").model_copy(update=changes)


def dumped(folder: Path, record: Record) -> Path:
    folder.mkdir(parents=True)
    path = folder / "record.json"
    path.write_text(record.model_dump_json())
    return path


def test_a_record_of_which_no_setting_was_seen_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = observed(seen_job({}))
    read = read_record(dumped(tmp_path / "run", record))
    assert read.model_dump() == record.model_dump()
    sections = [v for v in read.job.model_dump().values() if isinstance(v, dict)]
    assert {value for values in sections for value in values.values() if not isinstance(value, dict)} == {
        None
    }


def test_each_section_reads_a_record_in_which_one_setting_was_not_seen() -> None:
    sections = make_record().job.model_dump().items()
    known = {f"{name}.{key}": value for name, values in sections for key, value in values.items()}
    for name in known:
        job = seen_job({key: value for key, value in known.items() if key != name})
        details_document(Comparison([observed(job)]))
