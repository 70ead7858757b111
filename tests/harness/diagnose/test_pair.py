"""What cannot be diagnosed is refused in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.diagnose.rerun import read_pair
from harness.errors import HarnessError
from harness.record import ErrorPart, Record
from harness.record.store import archive_runs, read_runs, write_record
from tests.records import make_record


def write(folder: Path, **changes) -> Path:
    record: Record = make_record(run_id=folder.name, **changes)
    folder.mkdir(parents=True)
    write_record(folder, record)
    return folder


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "sound", label="ddp")


def refusal(*arguments: Path) -> str:
    done = CliRunner().invoke(harness, ["diagnose", *map(str, arguments)])
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_run_that_is_not_there(sound: Path) -> None:
    line = refusal(sound, sound.parent / "soumd")
    assert line == f"harness: there is no '{sound.parent}/soumd'. Did you mean 'sound'?"
    assert "Give the folder of a run" in refusal(sound, Path("nowhere/at-all"))


def test_a_folder_without_a_record(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no record" in refusal(sound, tmp_path / "empty")


def test_a_folder_of_several_runs(sound: Path) -> None:
    write(sound.parent / "another")
    assert "holds 2 records; give the folder of one run" in refusal(sound, sound.parent)


def test_runs_without_a_common_step(tmp_path: Path) -> None:
    record = make_record(label="ddp")
    ends = {"early": record.steps[:2], "late": record.steps[2:]}
    early, late = (write(tmp_path / name, label="ddp", steps=steps) for name, steps in ends.items())
    assert refusal(early, late).endswith(
        "these runs have no step in common: early took steps 0 to 1, late 2 to 3"
    )


def test_a_damaged_record(sound: Path, tmp_path: Path) -> None:
    for content, named in [
        ('{"schema_version": 1', "cannot be read"),
        ("{}", "not a record of this harness"),
    ]:
        (tmp_path / "damaged").mkdir(exist_ok=True)
        (tmp_path / "damaged" / "record.json").write_text(content)
        assert named in refusal(sound, tmp_path / "damaged")
        assert named in refusal(sound, tmp_path / "damaged" / "record.json")


def test_a_record_with_a_wrong_field(sound: Path, tmp_path: Path) -> None:
    document = json.loads((sound / "record.json").read_text()) | {"steps": "many"}
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "record.json").write_text(json.dumps(document))
    assert "is not valid: 'steps'" in refusal(sound, tmp_path / "wrong")


def test_a_cell_that_failed_or_is_unsupported(sound: Path, tmp_path: Path) -> None:
    failed = write(
        tmp_path / "failed", status="failed", error=ErrorPart(kind="Exit", message="gone"), steps=[]
    )
    assert "failed is failed (Exit: gone): only finished runs" in refusal(sound, failed)
    refused = write(tmp_path / "refused", status="unsupported", reasons=["needs a GPU"], steps=[])
    assert "refused is unsupported (needs a GPU)" in refusal(sound, refused)


def test_dropout_in_runs_of_one_job_only(tmp_path: Path, sound: Path) -> None:
    dropout = {"model": {"dropout": 0.1}}
    assert "dropout" in refusal(sound, write(tmp_path / "dropout", **dropout))
    read_pair(sound, write(tmp_path / "other-job", job_id="b" * 12, **dropout))


def test_a_backend_that_is_not_installed(tmp_path: Path, sound: Path) -> None:
    assert "backend 'theirs' is unknown" in refusal(sound, write(tmp_path / "theirs", label="theirs"))


def test_runs_on_different_devices(tmp_path: Path, sound: Path) -> None:
    world = make_record(label="ddp").world.model_copy(update={"device": "cuda"})
    assert "these runs were on cpu and cuda" in refusal(sound, write(tmp_path / "cuda", world=world))


def test_a_pair_is_read_from_folders_and_files(sound: Path) -> None:
    first, second = read_pair(sound, sound / "record.json")
    assert first.record == second.record
    assert first.name == "ddp on 2 ranks (first)"


def test_a_pair_is_read_from_an_archive(sound: Path, tmp_path: Path) -> None:
    archive = tmp_path / "runs.tar.xz"
    write(sound.parent / "another", label="ddp")
    archive_runs(read_runs([sound.parent])[0], archive)
    first, second = read_pair(archive / "sound", archive / "another" / "record.json")
    assert [run.record.run_id for run in (first, second)] == ["sound", "another"]
    hint = f"holds 2 records; give the folder of one run, such as {archive / 'another'}"
    assert hint in refusal(sound, archive)
    assert "holds no record" in refusal(sound, archive / "missing")


def test_read_pair_raises_for_what_the_command_line_tells(sound: Path) -> None:
    with pytest.raises(HarnessError, match="there is no"):
        read_pair(sound, Path("missing"))
