"""A report of records in an archive: what is done to the archive is named like what is done to a folder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record.store import ARCHIVE_NAME, RECORD_NAME, archive_runs, read_archive, write_archive
from harness.tell.report import write_report
from harness.tell.verify import verify
from tests.harness.tell.published import edit, found, point_to_the_list, write_runs
from tests.records import make_record

Files = dict[str, bytes]


@pytest.fixture(scope="session")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archived")
    archive = folder / ARCHIVE_NAME
    runs = archive_runs(write_runs(folder / "made"), archive)
    shutil.rmtree(folder / "made")
    for suffix in ("md", "html", "csv", "json", "tex"):
        write_report(runs, folder / f"report.{suffix}", folders=[archive])
    return folder


@pytest.fixture
def copy(archived: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(archived, tmp_path / "copy"))


def change(folder: Path, how: Callable[[Files], object]) -> None:
    """Pack the archive again with other files."""
    files = {
        n.removeprefix("runs/"): d for n, d in read_archive(folder / ARCHIVE_NAME, named=RECORD_NAME).items()
    }
    how(files)
    write_archive(folder / ARCHIVE_NAME, files, folder="runs")


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.csv", "report.json", "report.tex"])
def test_report_of_an_archive_holds(name: str, copy: Path) -> None:
    result = verify(copy / name)
    assert found(result) == result.notes == []
    assert "7 records unchanged" in result.summary


def test_archive_that_was_packed_again_holds(copy: Path) -> None:
    change(copy, lambda files: None)
    assert found(verify(copy / "report.md")) == []


def test_one_byte_of_a_packed_record_is_an_edit(copy: Path) -> None:
    name = f"run-ddp-1/{RECORD_NAME}"
    change(copy, lambda files: files.update({name: files[name] + b"\n"}))
    (problem,) = verify(copy / "report.md").problems
    assert f"record {ARCHIVE_NAME}/{name} was changed" in problem.what
    assert problem.line is not None
    assert "run-ddp-1" in (copy / problem.file).read_text().splitlines()[problem.line - 1]


def test_edited_figure_of_a_packed_record_is_named_with_what_it_changes(copy: Path) -> None:
    def faster(files: Files) -> None:
        document = json.loads(files[f"run-ddp-1/{RECORD_NAME}"])
        document["steps"][2]["seconds"] = 0.1
        files[f"run-ddp-1/{RECORD_NAME}"] = json.dumps(document).encode()

    change(copy, faster)
    problems = found(verify(copy / "report.md"))
    assert any(f"{ARCHIVE_NAME}/run-ddp-1/record.json was changed" in problem for problem in problems)
    assert any("the records give" in problem for problem in problems)


def test_record_that_was_taken_out_is_named(copy: Path) -> None:
    change(copy, lambda files: files.pop(f"run-ddp-1/{RECORD_NAME}"))
    result = verify(copy / "report.md")
    assert f"record {ARCHIVE_NAME}/run-ddp-1/record.json is missing" in found(result)[0]
    assert "not computed again" in result.notes[0]


@pytest.mark.parametrize("job_id", ["0123456789ab", "b" * 12])
def test_record_that_was_put_in_is_named(job_id: str, copy: Path) -> None:
    more = make_record(run_id="more", job_id=job_id).model_dump_json().encode()
    change(copy, lambda files: files.update({f"more/{RECORD_NAME}": more}))
    (problem,) = verify(copy / "report.md").problems
    assert f"record {ARCHIVE_NAME}/more/record.json lies next to the records" in problem.what


def test_record_taken_out_of_report_and_list_alike_is_still_in_the_archive(copy: Path) -> None:
    listed = copy / "report.manifest.json"
    entry = re.findall(rf'\{{\s*"path": "{ARCHIVE_NAME}/run-ddp-1/[^}}]*\}},\s*', listed.read_text())[0]
    edit(listed, entry, "")
    point_to_the_list(copy)
    problems = found(verify(copy / "report.md"))
    assert any(f"{ARCHIVE_NAME}/run-ddp-1/record.json lies next to" in problem for problem in problems)


@pytest.mark.parametrize("damage", [None, b"", b"no archive"])
def test_archive_that_is_missing_or_damaged_is_one_line(damage: bytes | None, copy: Path) -> None:
    (copy / ARCHIVE_NAME).unlink()
    if damage is not None:
        (copy / ARCHIVE_NAME).write_bytes(damage)
    with pytest.raises(HarnessError, match=rf"archive '.*{ARCHIVE_NAME}' (is|cannot)") as error:
        verify(copy / "report.md")
    assert "\n" not in str(error.value)


def test_two_archives_are_compared_before_and_after(tmp_path: Path) -> None:
    sides = []
    for side, slower in (("before", 0.0), ("after", 0.2)):
        made = write_runs(tmp_path / "made" / side, slower=slower)
        sides.append(archive_runs(made, tmp_path / f"{side}.tar.xz"))
    report = write_report(sides[1], tmp_path / "report.md", baseline=sides[0])
    assert found(verify(report)) == []
