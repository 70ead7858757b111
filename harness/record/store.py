"""Where records live: one folder per run, the record written to a temporary name and renamed."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import lzma
import math
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from harness.backends.refusals import explain_refusal
from harness.bounds import MOST_RECORD_BYTES
from harness.errors import HarnessError
from harness.files import LONGEST_NAME, make_atomically, plain_name, read_plain, refusing, write_atomically
from harness.nested import parse_json
from harness.record import SCHEMA_VERSION
from harness.record.run import Record
from harness.safe_text import redacted


def run_folder(root: Path, run_id: str) -> Path:
    """The folder of a run within `root`. Raises HarnessError for a run id that is no plain name."""
    try:
        return root / plain_name(run_id)
    except ValueError as error:
        shown = run_id if len(run_id) <= LONGEST_NAME else f"{run_id[:LONGEST_NAME]}..."
        raise HarnessError(f"run id {shown!r} is refused as a path: {error}") from error


def as_name(text: str) -> str:
    """A text as part of a run id: whatever could be misread as a path or by a shell becomes '_'."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)[:60]


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
        """The records of all runs in a folder or archive, by name; none if it is missing.

        Raises HarnessError for a folder that may not be listed.
        """
        if archive_of(folder) is not None:
            return sorted(path for path in self._members(folder) if path.parent.parent == folder)
        with refusing(f"folder '{folder}' cannot be read"):
            entries = os.listdir(folder) if folder.is_dir() else []
        return sorted(filter(_is_record, (folder / name / RECORD_NAME for name in entries)))

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
    """Whether a path names something that is no folder, or is closed; reading tells of both, and of pipes."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return isinstance(error, PermissionError)


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


def record_text(record: Record) -> str:
    """The record as JSON: a line for each key, and for each element of its lists of parts.

    Lists of numbers have no line breaks: with one value a line, a run of 64 ranks takes half as much again.
    """
    lines = []
    for name in Record.model_fields:
        value = getattr(record, name)
        parts = isinstance(value, list) and value and not isinstance(value[0], str)
        text = "[\n" + ",\n".join(map(_json, value)) + "]" if parts else _json(value)
        lines.append(f'"{name}":{text}')
    return "{" + ",\n".join(lines) + "}\n"


def _json(value: Any) -> str:
    """As pydantic writes a model: floats that are not finite are null."""
    return to_json(value, inf_nan_mode="null").decode()


_LONG_NUMBER = b"0" * 309
"""An integer beyond every float, its digits alike: no figure can be computed with it."""
_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_KEY = re.compile(rb'"([^"]*)"\s*:')


class Store:
    """A folder of runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Create the folder. Raises HarnessError where it cannot be written."""
        with refusing(f"runs folder '{self.root}' cannot be written", "; give another with --runs"):
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()

    def run_directory(self, run_id: str) -> Path:
        directory = run_folder(self.root, run_id)
        directory.mkdir(parents=True)
        return directory

    def record_path(self, record: Record) -> Path:
        return run_folder(self.root, record.run_id) / RECORD_NAME

    def discard(self, run_id: str) -> None:
        """Remove the folder of a run that never began."""
        shutil.rmtree(run_folder(self.root, run_id), ignore_errors=True)

    def records(self) -> tuple[list[Record], list[str]]:
        """All records of the folder, oldest first, and what is wrong with those that cannot be read."""
        found, problems = self.runs()
        return [record for _, record in found], problems

    def runs(self) -> tuple[list[tuple[Path, Record]], list[str]]:
        """As `records`, with the file of each record: a person may have renamed its folder."""
        files = RecordFiles()
        found, problems = _each_once(files.of_runs(self.root), files, read_record)
        return sorted(found, key=lambda run: (run[1].created_at, run[1].run_id)), problems


def write_record(directory: Path, record: Record) -> Path:
    """Write the record, without secrets, so that a reader sees all of it or nothing."""
    keep_record(directory, record)
    return directory / RECORD_NAME


def keep_record(directory: Path, record: Record) -> Record:
    """Write the record likewise; returns it as a reader of the file gets it, without secrets too."""
    path = directory / RECORD_NAME
    text = record_text(record)
    safe = redacted(text)
    write_atomically(path, safe)
    return record if safe == text else parse_record(safe.encode(), path)


def read_record(path: Path, files: RecordFiles | None = None) -> Record:
    """Read one record. Raises HarnessError if it is none, or of another schema version."""
    try:
        data = (files or RecordFiles()).read(path)
    except OSError as error:
        raise HarnessError(f"record {path} cannot be read: {error.strerror or error}") from error
    record = parse_record(data, path)
    record.once("sha256", lambda: hashlib.sha256(data).hexdigest())  # of what was read: files change and go
    return record


def parse_record(data: bytes, path: Path) -> Record:
    """The record in a file's bytes; raises HarnessError like `read_record`."""
    if (start := data.translate(_ALIKE).find(_LONG_NUMBER)) >= 0:
        key = _KEY.findall(data[:start])[-1:] or [b"?"]
        digits = len(data) - start - len(data[start:].lstrip(b"0123456789"))
        raise HarnessError(
            f"record {path} is not valid: '{key[0].decode(errors='replace')}' has a number of {digits} digits"
        )
    try:
        # Pydantic itself takes constants of Python for numbers, and the last of the values of one key.
        document = parse_json(data.decode())
        # Python takes half of a surrogate pair for text.
        record = Record.model_validate_json(data) if b"\\u" in data else Record.model_validate(document)
        world_size = record.world.world_size
        _in_order("ranks", [one.rank for one in record.ranks], world_size)
        _in_order("steps", [one.step for one in record.steps], math.inf)
        _in_order("comm", sorted({row.rank for row in record.comm}), world_size)
        return record
    except (ValueError, RecursionError) as error:
        raise _unreadable(data, path, error) from error


def _in_order(what: str, numbers: list[int], most: float) -> None:
    """Raises ValueError for numbers that no run has: twice, in another order, or of no rank of the world."""
    for before, number in pairwise([-1, *numbers]):
        if not before < number < most:
            raise ValueError(f"'{what}' has number {number}{f' after {before}' * (before >= 0)}")


def _unreadable(data: bytes, path: Path, error: Exception) -> HarnessError:
    """Why a file is no record: no JSON, another schema version, or a field that is wrong."""
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as damage:
        if not data.lstrip().startswith(b"{"):
            return HarnessError(f"{path} is no record, nor JSON: give a run's folder or its record.json")
        return HarnessError(f"record {path} cannot be read: {damage}")
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is None:
        return HarnessError(f"{path} is not a record of this harness: it has no schema_version")
    if version != SCHEMA_VERSION:
        given = f"'{version}', a text" if isinstance(version, str) else version
        return HarnessError(
            f"record {path} has schema version {given}; this harness reads {SCHEMA_VERSION} only: read "
            "it with the version that wrote it"
        )
    reason = explain_refusal(error, Record) if isinstance(error, ValidationError) else error
    return HarnessError(f"record {path} is not valid: {reason}")


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the garbage collector, and afterwards exempt what exists from it.

    Records hold no cycles and millions of objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class OfRun(Protocol):
    """A record, or what was kept of it."""

    @property
    def run_id(self) -> str: ...


Read = TypeVar("Read", bound=OfRun)


def read_runs(paths: Iterable[Path]) -> tuple[list[tuple[Path, Record]], list[str]]:
    """Read records from files, run folders, folders of runs and archives of these, each run once, in order.

    Returns (path, record) pairs, and what is wrong with records that cannot be read or are copies of
    another. Raises HarnessError if there is no record, none can be read, or a file that was named itself
    cannot.
    """
    return read_each(paths, read_record)


@without_collection()
def read_each(
    paths: Iterable[Path], read: Callable[[Path, RecordFiles], Read]
) -> tuple[list[tuple[Path, Read]], list[str]]:
    """As `read_runs`, with what `read` makes of each file; it raises HarnessError like `read_record`."""
    files = RecordFiles()
    named = list(paths)
    places: list[Path] = []
    for path in named:
        found = files.find(place_of_runs(path))
        if not found:
            why = "holds no record" if archive_of(path) or path.exists() else "does not exist"
            raise HarnessError(
                f"'{path}' {why}: give a record.json, a run folder, a folder of runs or a runs.tar.xz"
            )
        places += found
    runs, problems = _each_once(places, files, read, named)
    if not runs and problems:
        which = f"none of {len(problems)} records can be read; the first: " if len(problems) > 1 else ""
        raise HarnessError(which + problems[0])
    return [(file.resolve(), record) for file, record in runs], problems


def _each_once(
    places: Iterable[Path],
    files: RecordFiles,
    read: Callable[[Path, RecordFiles], Read],
    named: Sequence[Path] = (),
) -> tuple[list[tuple[Path, Read]], list[str]]:
    """Of one run id the file whose folder has that name, else the first; and what is wrong with others.

    Raises HarnessError where one of `named` cannot be read.
    """
    runs: dict[str, tuple[Path, Read]] = {}
    problems = []
    for file in places:
        try:
            record = read(file, files)
        except HarnessError as error:
            if file in named:
                raise
            problems.append(str(error))
            continue
        run_id, other = record.run_id, file
        first, _ = runs.setdefault(run_id, (file, record))
        if file.parent.name == run_id != first.parent.name:
            runs[run_id], first, other = (file, record), file, first
        if first is not other and first.resolve() != other.resolve():
            try:
                what = f"is a copy of {first}"
                if files.read(first) != files.read(other):
                    what = f"differs from {first}, and both say it is theirs"
            except OSError as error:  # changed or gone since
                what = f"and {first} cannot be compared: {error.strerror or error}"
            problems.append(str(HarnessError(f"record {other} {what}: run {run_id} counts once")))
    return list(runs.values()), problems


def keep_runs(runs: Sequence[tuple[Path, Record]], folder: Path) -> list[tuple[Path, Record]]:
    """Make a folder hold exactly these records, as links where it can; returns them by their paths in it.

    It holds nothing but records, so that others of an earlier call are removed. Raises HarnessError.
    """
    kept = [(folder / path.parent.name / RECORD_NAME, record) for path, record in runs]
    with refusing(f"records cannot be kept in '{folder}'"):
        for (path, _), (own, _) in zip(runs, kept, strict=True):
            own.parent.mkdir(parents=True, exist_ok=True)
            if not (own.exists() and own.samefile(path)):
                make_atomically(own, partial(_link, path))
        for other in set(folder.glob(f"*/{RECORD_NAME}")) - {own for own, _ in kept}:
            other.unlink()
            other.parent.rmdir()
    return kept


def _link(path: Path, temporary: Path) -> None:
    """Give a file a second name, or copy it to another file system."""
    try:
        temporary.hardlink_to(path.resolve())
    except OSError:
        shutil.copyfile(path, temporary)


def archive_runs(runs: Sequence[tuple[Path, Record]], archive: Path) -> list[tuple[Path, Record]]:
    """Copy records byte by byte into an archive; returns them by their paths in it.

    Raises HarnessError if the archive holds other records already.
    """
    files = RecordFiles()
    packed = [(run_folder(archive, record.run_id) / RECORD_NAME, record) for _, record in runs]
    pack_records({record.run_id: files.read(path) for path, record in runs}, archive)
    return packed
