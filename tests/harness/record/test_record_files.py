"""Runs in an archive are read like runs in a folder."""

import json
import subprocess
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.record.store import (
    ARCHIVE_NAME,
    RECORD_NAME,
    SUFFIX,
    archive_runs,
    is_folder_of_runs,
    place_of_runs,
    read_record,
    read_runs,
    write_archive,
    write_record,
)
from tests.records import make_record


def saved(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    return write_record(root / name, make_record(run_id=name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        saved(tmp_path / "runs", name)
    return tmp_path / "runs"


@pytest.fixture
def archive(folder: Path) -> Path:
    archive_runs(read_runs([folder])[0], folder.parent / ARCHIVE_NAME)
    return folder.parent / ARCHIVE_NAME


def test_archive_gives_the_records_of_its_folder_in_the_same_order(folder: Path, archive: Path) -> None:
    of_folder, of_archive = (read_runs([path])[0] for path in (folder, archive))
    assert [record for _, record in of_archive] == [record for _, record in of_folder]
    assert [path for path, _ in of_archive] == [archive / p.relative_to(folder) for p, _ in of_folder]


@pytest.mark.parametrize("name", ["b", f"b/{RECORD_NAME}"])
def test_one_run_of_an_archive_is_named_like_one_of_a_folder(name: str, archive: Path) -> None:
    ((path, record),), _ = read_runs([archive / name])
    assert (path, record.run_id) == (archive / "b" / RECORD_NAME, "b")
    assert read_record(path) == record


def test_archives_of_one_folder_or_of_runs_side_by_side_are_read(folder: Path) -> None:
    subprocess.run(["tar", "-cJf", "of-folder.tar.xz", "runs"], cwd=folder.parent, check=True)
    subprocess.run(["tar", "-cJf", "side-by-side.tar.xz", "-C", "runs", "."], cwd=folder.parent, check=True)
    for name in ("of-folder.tar.xz", "side-by-side.tar.xz"):
        found, _ = read_runs([folder.parent / name])
        assert [path for path, _ in found] == [folder.parent / name / run / RECORD_NAME for run in "abc"]


def test_run_in_a_folder_and_in_an_archive_counts_once(folder: Path, archive: Path) -> None:
    found, problems = read_runs([folder / "a", archive])
    assert [path.parent for path, _ in found] == [folder / "a", archive / "b", archive / "c"]
    assert ["is a copy of" in problem for problem in problems] == [True]


def test_damaged_record_of_an_archive_is_passed_over_by_name(folder: Path) -> None:
    files = {"a/record.json": b"{", "b/record.json": (folder / "b" / RECORD_NAME).read_bytes()}
    write_archive(folder.parent / "x.tar.xz", files, folder="runs")
    found, problems = read_runs([folder.parent / "x.tar.xz"])
    assert [record.run_id for _, record in found] == ["b"]
    assert "x.tar.xz/a/record.json cannot be read" in problems[0]


@pytest.mark.parametrize("name", ["missing", "a/other.json"])
def test_what_an_archive_lacks_is_refused(name: str, archive: Path) -> None:
    with pytest.raises(HarnessError, match="holds no record"):
        read_runs([archive / name])
    with pytest.raises(HarnessError, match="cannot be read: no"):
        read_record(archive / name)


def test_archive_without_records_is_refused(tmp_path: Path) -> None:
    write_archive(tmp_path / "x.tar.xz", {"a/notes": b""}, folder="runs")
    with pytest.raises(HarnessError, match="holds no record"):
        read_runs([tmp_path / "x.tar.xz"])


def test_folder_that_is_named_like_an_archive_is_a_folder(folder: Path) -> None:
    named = folder.rename(folder.with_name(f"x{SUFFIX}"))
    assert [path for path, _ in read_runs([named])[0]] == [named / run / RECORD_NAME for run in "abc"]


def test_records_are_packed_byte_by_byte_whatever_their_form(folder: Path) -> None:
    path = folder / "a" / RECORD_NAME
    path.write_text(json.dumps(json.loads(path.read_text())) + "\n\n")
    archive_runs(read_runs([folder])[0], folder.parent / ARCHIVE_NAME)
    folder.rename(folder.with_name("before"))
    subprocess.run(["tar", "-xf", ARCHIVE_NAME], cwd=folder.parent, check=True)
    subprocess.run(["diff", "-r", "runs", "before"], cwd=folder.parent, check=True)


def test_archive_of_the_same_records_stays_as_it_is(folder: Path, archive: Path) -> None:
    subprocess.run(["tar", "-cJf", ARCHIVE_NAME, "runs"], cwd=folder.parent, check=True)
    before = archive.read_bytes()
    for runs in (folder, archive):
        archive_runs(read_runs([runs])[0], archive)
        assert archive.read_bytes() == before


def test_archive_of_other_records_is_not_replaced(folder: Path, archive: Path) -> None:
    before = archive.read_bytes()
    with pytest.raises(HarnessError, match="holds other records, perhaps of another report; remove it"):
        archive_runs(read_runs([folder / "a"])[0], archive)
    assert archive.read_bytes() == before


def test_an_archive_is_a_folder_of_runs_and_a_run_in_it_is_not(folder: Path, archive: Path) -> None:
    given = [folder, folder / "a", archive, archive / "a", archive / "a" / RECORD_NAME]
    assert [is_folder_of_runs(path) for path in given] == [True, False, True, False, False]


def test_a_folder_with_its_records_in_an_archive_is_read_like_the_archive(
    folder: Path, archive: Path, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    archive.rename(published / ARCHIVE_NAME)
    assert place_of_runs(published) == published / ARCHIVE_NAME
    assert place_of_runs(folder) == folder
    runs, problems = read_runs([published])
    assert problems == []
    assert runs == read_runs([published / ARCHIVE_NAME])[0]


def test_records_none_of_which_can_be_read_are_refused_by_one_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD_NAME).write_text("{")
    with pytest.raises(HarnessError, match=r"none of 2 records can be read; the first: record .*cannot be"):
        read_runs([tmp_path])
