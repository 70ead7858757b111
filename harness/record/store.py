"""Where records live: one folder per run, the record written to a temporary name and renamed."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from harness.backends.refusals import explain_refusal
from harness.errors import HarnessError
from harness.files import make_atomically, refusing, stream_number, write_atomically
from harness.record import SCHEMA_VERSION
from harness.record.record_files import RECORD_NAME, RecordFiles, pack_records, place_of_runs
from harness.record.run import Record
from harness.record.run_id import run_folder
from harness.safe_text import redacted


def record_text(record: Record) -> str:
    """The record as JSON: a line for each key, and for each element of its lists of parts.

    Lists of numbers have no line breaks: with one value a line, a run of 64 ranks takes half as much again.
    """
    lines = [f'"{name}":{_value(getattr(record, name))}' for name in Record.model_fields]
    return "{" + ",\n".join(lines) + "}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        return "[\n" + ",\n".join(map(_json, value)) + "]"
    return _json(value)


def _json(value: Any) -> str:
    """As pydantic writes a model: floats that are not finite are null."""
    return to_json(value, inf_nan_mode="null").decode()


_LONG_NUMBER = re.compile(rb"\d{309,}")
"""An integer beyond every float: no figure can be computed with it."""


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
        """Make the folder of a new run."""
        directory = run_folder(self.root, run_id)
        directory.mkdir(parents=True)
        return directory

    def record_path(self, record: Record) -> Path:
        """Where a record of this folder lies."""
        return run_folder(self.root, record.run_id) / RECORD_NAME

    def discard(self, run_id: str) -> None:
        """Remove the folder of a run that never began."""
        shutil.rmtree(run_folder(self.root, run_id), ignore_errors=True)

    def records(self) -> tuple[list[Record], list[str]]:
        """All records of the folder, oldest first, and what is wrong with those that cannot be read."""
        found, problems = self.runs()
        return [record for _, record in found], problems

    def runs(self) -> tuple[list[tuple[Path, Record]], list[str]]:
        """The same with the file of each record: a person may have renamed its folder."""
        found, problems = [], []
        for path in sorted(p for p in self.root.glob(f"*/{RECORD_NAME}") if not p.is_dir()):
            try:
                found.append((path, read_record(path)))
            except HarnessError as error:
                problems.append(str(error))
        return sorted(found, key=lambda run: (run[1].created_at, run[1].run_id)), problems


def try_writing(path: Path) -> None:
    """Open a file for writing and leave it as it was. Raises OSError where that cannot be done.

    A stream of the shell is open already.
    """
    if stream_number(path) is not None:
        return
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


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
    return parse_record(data, path)


def parse_record(data: bytes, path: Path) -> Record:
    """The record in a file's bytes; raises HarnessError like `read_record`."""
    if (number := _LONG_NUMBER.search(data)) is not None:
        raise HarnessError(f"record {path} is not valid: it has a number of {len(number[0])} digits")
    if (b"NaN" in data or b"Infinity" in data) and (found := _constants(data)):
        raise HarnessError(f"record {path} is not valid: it has {found[0]}, which is no number of JSON")
    try:
        return Record.model_validate_json(data)
    except (ValidationError, ValueError) as error:
        raise _unreadable(data, path, error) from error


def _constants(data: bytes) -> list[str]:
    """What Python takes for numbers and JSON does not; records have null in its place."""
    found: list[str] = []
    with suppress(ValueError, RecursionError):  # named by who reads the record
        json.loads(data, parse_constant=found.append)
    return found


def _unreadable(data: bytes, path: Path, error: ValueError) -> HarnessError:
    """Why a file is no record: no JSON, another schema version, or a field that is wrong."""
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as damage:
        return HarnessError(f"record {path} cannot be read: {damage}")
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is None:
        return HarnessError(f"{path} is not a record of this harness: it has no schema_version")
    if version != SCHEMA_VERSION:
        return HarnessError(
            f"record {path} has schema version {version}; this harness reads {SCHEMA_VERSION} only"
        )
    reason = explain_refusal(error, Record) if isinstance(error, ValidationError) else error
    return HarnessError(f"record {path} is not valid: {reason}")


def read_runs(paths: Iterable[Path]) -> tuple[list[tuple[Path, Record]], list[str]]:
    """Read records from files, run folders, folders of runs and archives of these, each run once, in order.

    Returns (path, record) pairs, and what is wrong with records that cannot be read or are copies of
    another. Raises HarnessError if there is no record, none can be read, or a file that was named itself
    cannot.
    """
    with without_collection():
        return _read_all(paths)


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


def _read_all(paths: Iterable[Path]) -> tuple[list[tuple[Path, Record]], list[str]]:
    files = RecordFiles()
    seen: dict[Path, Record] = {}
    runs: dict[str, Path] = {}
    problems = []
    for path in paths:
        found = files.find(place_of_runs(path))
        if not found:
            raise HarnessError(
                f"'{path}' holds no record: give a record.json, a run folder, a folder of runs or a "
                "runs.tar.xz"
            )
        for file in found:
            try:
                record = read_record(file, files)
            except HarnessError as error:
                if file == path:
                    raise
                problems.append(str(error))
                continue
            place = file.resolve()
            first = runs.setdefault(record.run_id, place)
            if first == place:
                seen[first] = record
            else:
                problems.append(f"record {file} is a copy of {first}: run {record.run_id} counts once")
    if not seen and problems:
        which = f"none of {len(problems)} records can be read; the first: " if len(problems) > 1 else ""
        raise HarnessError(which + problems[0])
    return list(seen.items()), problems


def keep_runs(runs: Sequence[tuple[Path, Record]], folder: Path) -> list[tuple[Path, Record]]:
    """Make a folder hold exactly these records, as links where it can; returns them by their paths in it.

    It holds nothing but records, so that others of an earlier call are removed. Raises HarnessError.
    """
    kept = [(folder / path.parent.name / RECORD_NAME, record) for path, record in runs]
    with refusing(f"records cannot be kept in '{folder}'"):
        for (path, _), (own, _) in zip(runs, kept, strict=True):
            own.parent.mkdir(parents=True, exist_ok=True)
            if not (own.exists() and own.samefile(path)):
                _link(path, own)
        for other in set(folder.glob(f"*/{RECORD_NAME}")) - {own for own, _ in kept}:
            other.unlink()
            other.parent.rmdir()
    return kept


def _link(path: Path, own: Path) -> None:
    """Give a file a second name, or copy it to another file system."""

    def make(temporary: Path) -> None:
        try:
            temporary.hardlink_to(path.resolve())
        except OSError:
            shutil.copyfile(path, temporary)

    make_atomically(own, make)


def archive_runs(runs: Sequence[tuple[Path, Record]], archive: Path) -> list[tuple[Path, Record]]:
    """Copy records byte by byte into an archive; returns them by their paths in it.

    Raises HarnessError if the archive holds other records already.
    """
    files = RecordFiles()
    packed = [(run_folder(archive, record.run_id) / RECORD_NAME, record) for _, record in runs]
    pack_records({record.run_id: files.read(path) for path, record in runs}, archive)
    return packed
