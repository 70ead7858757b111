"""Records are written and read back; what is no record, or would lead out of its folder, is refused."""

import gc
import json
import shutil
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
from harness.record.store import (
    Store,
    as_name,
    keep_runs,
    parse_record,
    plain_name,
    read_record,
    read_runs,
    run_folder,
    without_collection,
    write_record,
)
from harness.slurm.matrix import read_matrix
from harness.tell.report import details_document
from tests.harness.slurm.test_runs import a_matrix
from tests.records import make_model, make_record, saved


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


OUTSIDE = [
    "../../x",
    "/tmp/x",
    "a/b",
    "..",
    ".",
    "",
    ".hidden",
    "a\\b",
    "nul\0",
    "two\nlines",
    "x" * 300,
    "\udc80",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_run_id_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HarnessError, match="refused as a path"):
        run_folder(tmp_path, name)


def test_run_id_of_a_run_is_a_folder_in_the_runs_folder(tmp_path: Path) -> None:
    assert (
        run_folder(tmp_path, "20260102-030405-zero3-n2-r0-abc")
        == tmp_path / "20260102-030405-zero3-n2-r0-abc"
    )
    assert plain_name(f"n-{as_name('../my backend')}") == "n-.._my_backend"


@pytest.mark.parametrize("name", ["../../planted", "/tmp/planted"])
def test_export_of_a_record_whose_run_id_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    write_record(tmp_path, make_record(run_id=name))
    board = tmp_path / "a" / "b" / "board"
    arguments = ["export", "tracking", str(tmp_path / "record.json"), "--to", "tensorboard", "-o", str(board)]
    done = CliRunner().invoke(harness, arguments)
    assert done.exit_code == 1
    assert "refused as a path" in done.stderr
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
