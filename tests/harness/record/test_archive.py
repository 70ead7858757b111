"""An archive gives back what was packed, always in the same bytes; a hostile or damaged one is refused."""

import io
import json
import lzma
import random
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.record import store
from harness.record.store import (
    ARCHIVE_NAME,
    RECORD_NAME,
    SUFFIX,
    archive_runs,
    is_folder_of_runs,
    place_of_runs,
    read_archive,
    read_record,
    read_runs,
    write_archive,
)
from tests.records import saved

NAME = "record.json"
FILES = {f"run-{n}/{NAME}": bytes(random.Random(n).randbytes(3000 + n)) for n in range(5)}
IN_RUNS = {f"runs/{name}": data for name, data in FILES.items()}


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **changes: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in changes.items():
        setattr(info, key, value)
    return info


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(HarnessError) as error:
        read_archive(path, named=NAME)
    message = str(error.value)
    assert message.startswith(f"archive '{path}' ")
    assert "\n" not in message
    return message


def test_files_come_back_byte_by_byte_and_equal_ones_give_equal_bytes_without_time_or_owner(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"
    write_archive(one, FILES, folder="runs")
    write_archive(other, dict(reversed(FILES.items())), folder="runs")
    assert read_archive(one, named=NAME) == IN_RUNS
    assert sorted(tmp_path.iterdir()) == [one, other]
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}
        assert [m.name for m in tar] == sorted(IN_RUNS)


def test_tar_unpacks_an_archive_and_one_that_it_packed_is_read(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.tar.xz", FILES, folder="runs")
    subprocess.run(["tar", "-xf", "a.tar.xz"], cwd=tmp_path, check=True)
    assert {n: (tmp_path / n).read_bytes() for n in IN_RUNS} == IN_RUNS
    (tmp_path / "runs" / "run-0" / "rank-00000.log").write_text("no record")
    subprocess.run(["tar", "-cJf", "b.tar.xz", "runs"], cwd=tmp_path, check=True)
    subprocess.run(["tar", "-cJf", "c.tar.xz", "-C", "runs", "."], cwd=tmp_path, check=True)
    assert read_archive(tmp_path / "b.tar.xz", named=NAME) == IN_RUNS
    assert read_archive(tmp_path / "c.tar.xz", named=NAME) == FILES


NEITHER = "neither a plain file nor a folder"
SPARSE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "1"}
CHAIN = packed((member("x", tarfile.XHDTYPE), b""))[:512] * 5000 + bytes(1024)
WIDE = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**28, "mode": lzma.MODE_FAST, "nice_len": 8, "mf": 3}]
FEW = packed((member("a/record.json"), b"{}"))


@pytest.mark.parametrize(
    "name", ["/etc/x/record.json", "../x/record.json", "a/../../record.json", "a\n/b", ".."]
)
def test_a_name_that_leads_out_or_is_not_plain_is_refused(name: str, tmp_path: Path) -> None:
    data = lzma.compress(packed((member("a/record.json"), b"{}"), (member(name), b"{}")))
    assert "leads out of it or is not a plain name" in refused(tmp_path / "a.tar.xz", data)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        *(([(member("a/record.json", kind, linkname="/etc/passwd"), b"")], NEITHER)
          for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
                       tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"?")),
        ([(member("a/record.json", pax_headers=SPARSE), b"x")], NEITHER),
        *(([(member("a/record.json"), b"1"), (member(again), b"2")], "holds 'a/record.json' twice")
          for again in ("a/record.json", "./a//record.json")),
        *(([(member("a/record.json", pax_headers={"size": size}), b"x"), (member("b/record.json"), b"y")], "")
          for size in ("-512", str(2**80))),
        ([(member("a/notes"), bytes(2**22))], "unpacks to more than 2,097,152 bytes, the most allowed"),
        ([(member("a/record.json"), bytes(1001))], "of 1,001 bytes; from 0 to 1,000 are allowed"),
        ([(member(f"{n}/{NAME}"), b"") for n in range(4)], "holds more than 3 files"),
    ],
)  # fmt: skip
def test_what_no_archive_of_records_holds_is_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, most in (("MOST_BYTES", 2**21), ("MOST_MEMBER_BYTES", 1000), ("MOST_MEMBERS", 3)):
        monkeypatch.setattr(store, limit, most)
    data = lzma.compress(packed(*members))
    assert len(data) < 2**13
    assert says in refused(tmp_path / "a.tar.xz", data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: data[:-1], "is truncated"),
        (lambda data: b"", "is truncated"),
        (lambda data: b"PK\3\4" + data, "cannot be unpacked"),
        (lambda data: data[:5000] + b"\0" + data[5001:], "cannot be unpacked"),
        (lambda data: data + data, "has data after its end"),
        (lambda data: data + b"\0", "has data after its end"),
        (lambda data: lzma.compress(lzma.decompress(data)[:9000]), "no readable tar"),
        (lambda data: lzma.compress(lzma.decompress(data)[:3584]), "is damaged after"),
        (lambda data: lzma.compress(lzma.decompress(data).replace(b"run-3", b"run-9")), "is damaged after"),
        (lambda data: lzma.compress(b"no archive" * 200), "no readable tar"),
        (lambda data: lzma.compress(b""), "no readable tar"),
        (lambda data: lzma.compress(CHAIN), "no readable tar"),
        (lambda data: lzma.compress(FEW, filters=WIDE), "cannot be unpacked (Memory usage limit exceeded)"),
    ],
)
def test_damaged_archive_is_one_line(damage: Callable[[bytes], bytes], says: str, tmp_path: Path) -> None:
    whole = lzma.compress(packed(*((member(name), data) for name, data in FILES.items())))
    assert says in refused(tmp_path / "a.tar.xz", damage(whole))


@settings(max_examples=300)
@given(place=st.integers(0, 4 * 512), value=st.binary(min_size=1, max_size=12), fix=st.booleans())
def test_any_header_gives_files_or_a_refusal(
    place: int, value: bytes, fix: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    info = member("a" * 120 + "/record.json", pax_headers={"comment": "long"})
    tar = bytearray(packed((info, b"{}"), (member("b/record.json"), b"[]")))
    tar[place : place + len(value)] = value
    if fix:
        start = place // 512 * 512
        header = tar[start : start + 512]
        header[148:156] = b" " * 8
        tar[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    path = tmp_path_factory.mktemp("fuzz") / "a.tar.xz"
    path.write_bytes(lzma.compress(tar, preset=0))
    with suppress(HarnessError):
        read_archive(path, named=NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        saved(tmp_path / "runs", name)
    return tmp_path / "runs"


@pytest.fixture
def archive(folder: Path) -> Path:
    archive_runs(read_runs([folder])[0], folder.parent / ARCHIVE_NAME)
    return folder.parent / ARCHIVE_NAME


def test_archive_gives_the_records_of_its_folder_in_the_same_order_and_each_by_its_name(
    folder: Path, archive: Path
) -> None:
    of_folder, of_archive = (read_runs([path])[0] for path in (folder, archive))
    assert [record for _, record in of_archive] == [record for _, record in of_folder]
    assert [path for path, _ in of_archive] == [archive / p.relative_to(folder) for p, _ in of_folder]
    for name in ("b", f"b/{RECORD_NAME}"):
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


def test_what_an_archive_lacks_is_refused_and_so_is_one_without_records_or_that_is_missing(
    archive: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "x.tar.xz"
    write_archive(empty, {"a/notes": b""}, folder="runs")
    for path in (archive / "missing", archive / "a/other.json", empty):
        with pytest.raises(HarnessError, match="holds no record"):
            read_runs([path])
    for name in ("missing", "a/other.json"):
        with pytest.raises(HarnessError, match="cannot be read: no"):
            read_record(archive / name)
    with pytest.raises(HarnessError, match=r"none\.tar\.xz' is missing or no file"):
        read_archive(tmp_path / "none.tar.xz", named=NAME)


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


def test_archive_of_the_same_records_stays_as_it_is_and_of_others_is_not_replaced(
    folder: Path, archive: Path
) -> None:
    subprocess.run(["tar", "-cJf", ARCHIVE_NAME, "runs"], cwd=folder.parent, check=True)
    before = archive.read_bytes()
    for runs in (folder, archive):
        archive_runs(read_runs([runs])[0], archive)
        assert archive.read_bytes() == before
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
