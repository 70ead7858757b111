"""Finds and reads the files of records, in folders and in archives alike; not what is in them.

An archive is a folder packed into one file, NAME.tar.xz: the same files give the same bytes, `tar -xf`
unpacks it. It may come from anybody: it is read in memory only, within limits, and whatever a folder of
records cannot hold is refused.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

from harness.bounds import MOST_RECORD_BYTES
from harness.errors import HarnessError
from harness.files import read_plain, write_atomically

SUFFIX = ".tar.xz"
MOST_BYTES = 2**30
"""Unpacked, of the whole archive."""
MOST_MEMBER_BYTES = 2**26
MOST_MEMBERS = 100_000
"""Files and folders."""
MOST_DECODER_BYTES = 2**27
"""Of the dictionary with which it was compressed; `xz -9` needs half of it."""
BLOCK_BYTES = 2**20
ADVICE = "pack the records again with `harness report RUNS -o FILE --archive`"


def archive_of(path: Path) -> Path | None:
    """The archive that a path names or lies in, whether it exists or not; None for any other path."""
    places = (place for place in (path, *path.parents) if place.name.endswith(SUFFIX))
    return next((place for place in places if not place.is_dir()), None)


def write_archive(path: Path, files: Mapping[str, bytes], *, folder: str) -> None:
    """Pack files by name into `folder`, without times and owners; readers see all of it or nothing."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    write_atomically(path, lzma.compress(packed.getbuffer(), preset=9 | lzma.PRESET_EXTREME))


def read_archive(path: Path, *, named: str) -> dict[str, bytes]:
    """The files of this name at any depth, by their paths in the archive.

    Raises HarnessError if the archive is missing, damaged or truncated, holds anything but files and
    folders, a name twice or one that leads out of it, or more than the limits above.
    """
    unpacked = _unpack(path)
    try:
        with tarfile.open(fileobj=unpacked, mode="r:") as tar:
            files = _read_members(path, tar, unpacked, named)
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(path, f"holds no readable tar archive ({error})") from error
    unpacked.seek(end)
    rest = unpacked.read()
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise _refusal(path, "is damaged after its last readable file")
    return files


def _unpack(path: Path) -> io.BytesIO:
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MOST_DECODER_BYTES)
    unpacked = io.BytesIO()
    try:
        if not path.is_file():
            raise HarnessError(f"archive '{path}' is missing or no file; put it back, or {ADVICE}")
        with path.open("rb") as file:
            while not decoder.eof:
                block = file.read(BLOCK_BYTES) if decoder.needs_input else b""
                if decoder.needs_input and not block:
                    raise _refusal(path, "is truncated")
                unpacked.write(decoder.decompress(block, max_length=BLOCK_BYTES))
                if unpacked.tell() > MOST_BYTES:
                    raise _refusal(path, f"unpacks to more than {MOST_BYTES:,} bytes, the most allowed")
            if decoder.unused_data or file.read(1):
                raise _refusal(path, "has data after its end")
    except (OSError, lzma.LZMAError) as error:
        raise _refusal(path, f"cannot be unpacked ({error})") from error
    unpacked.seek(0)
    return unpacked


def _read_members(path: Path, tar: tarfile.TarFile, unpacked: io.BytesIO, named: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    seen: set[str] = set()
    offset = -1
    for member in tar:
        if member.offset <= offset:
            raise tarfile.ReadError("a member begins before the one in front of it")
        offset = member.offset
        name = _safe_name(path, member)
        if name in seen:
            raise _refusal(path, f"holds '{name}' twice")
        seen.add(name)
        if len(seen) > MOST_MEMBERS:
            raise _refusal(path, f"holds more than {MOST_MEMBERS:,} files, the most allowed")
        if member.isfile() and name.rpartition("/")[2] == named:
            files[name] = unpacked.getbuffer()[member.offset_data :][: member.size].tobytes()
    return files


def _safe_name(path: Path, member: tarfile.TarInfo) -> str:
    """The member's name without './'. Raises HarnessError for what a folder of records cannot hold."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or not member.name.isprintable():
        raise _refusal(path, f"holds {member.name!r}, which leads out of it or is not a plain name")
    if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)) or member.issparse():
        raise _refusal(path, f"holds '{member.name}', which is neither a plain file nor a folder")
    if not 0 <= member.size <= MOST_MEMBER_BYTES:
        allowed = f"from 0 to {MOST_MEMBER_BYTES:,} are allowed"
        raise _refusal(path, f"holds '{member.name}' of {member.size:,} bytes; {allowed}")
    return "/".join(part for part in parts if part not in ("", "."))


def _refusal(path: Path, what: str) -> HarnessError:
    return HarnessError(f"archive '{path}' {what}; copy it again, or {ADVICE}")


RECORD_NAME = "record.json"
ARCHIVE_NAME = "runs.tar.xz"
_PACKED_FOLDER = "runs"


class RecordFiles:
    """Finds and reads records; keeps each archive unpacked in memory, so that it is unpacked once."""

    def __init__(self) -> None:
        self._archives: dict[Path, dict[Path, bytes]] = {}

    def find(self, path: Path) -> list[Path]:
        """The record, the run's record or the records of the runs that a path names, by name."""
        if archive_of(path) is not None:
            return sorted(p for p in self._members(path) if p == path or path in p.parents)
        if _is_record(path):
            return [path]
        return [path / RECORD_NAME] if _is_record(path / RECORD_NAME) else self.of_runs(path)

    def of_runs(self, folder: Path) -> list[Path]:
        """The records of all runs in a folder or archive, by name; none if it is missing."""
        if archive_of(folder) is not None:
            return sorted(path for path in self._members(folder) if path.parent.parent == folder)
        return sorted(path for path in folder.glob(f"*/{RECORD_NAME}") if _is_record(path))

    def exists(self, path: Path) -> bool:
        """Whether a record's file is there. Raises HarnessError for an archive that cannot be read."""
        return path in self._members(path) if archive_of(path) is not None else path.is_file()

    def read(self, path: Path) -> bytes:
        """A record's bytes. Raises OSError, or HarnessError for an archive that cannot be read."""
        if archive_of(path) is None:
            return read_plain(path, MOST_RECORD_BYTES)
        if not self.exists(path):
            raise FileNotFoundError(f"no '{path}' in the archive")
        return self._members(path)[path]

    def _members(self, path: Path) -> Mapping[Path, bytes]:
        archive = archive_of(path)
        assert archive is not None
        if archive not in self._archives:
            files = read_archive(archive, named=RECORD_NAME)
            self._archives[archive] = {archive / name: data for name, data in _of_one_folder(files).items()}
        return self._archives[archive]


def _is_record(path: Path) -> bool:
    """Whether a path names something that is no folder; reading tells of pipes and devices."""
    return path.exists() and not path.is_dir()


def pack_records(files: Mapping[str, bytes], archive: Path) -> None:
    """Pack records by their runs' names. An archive that holds the same records stays as it is.

    Raises HarnessError if it holds others: they may be those of another report.
    """
    named = {f"{run}/{RECORD_NAME}": data for run, data in files.items()}
    if not archive.exists():
        write_archive(archive, named, folder=_PACKED_FOLDER)
    elif _of_one_folder(read_archive(archive, named=RECORD_NAME)) != named:
        raise HarnessError(
            f"archive '{archive}' holds other records, perhaps of another report; remove it, or write the "
            "report into another folder"
        )


def place_of_runs(path: Path) -> Path:
    """The archive of a folder that has its records in one, as a published report does; else the path."""
    archive = path / ARCHIVE_NAME
    has_files = (path / RECORD_NAME).is_file() or any(path.glob(f"*/{RECORD_NAME}"))
    return path if has_files or not archive.is_file() else archive


def is_folder_of_runs(path: Path) -> bool:
    """Whether a path names a folder or archive of runs rather than one run or record."""
    if archive_of(path) is not None:
        return archive_of(path) == path
    return path.is_dir() and not (path / RECORD_NAME).is_file()


def _of_one_folder(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files without the one folder in which all runs lie, as `tar` packs a folder of runs."""
    runs = {name.partition("/")[0] for name in files}
    if len(runs) == 1 and all(name.count("/") > 1 for name in files):
        return {name.partition("/")[2]: data for name, data in files.items()}
    return dict(files)
