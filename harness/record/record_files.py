"""Finds and reads the files of records, in folders and in archives alike; not what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.bounds import MOST_RECORD_BYTES
from harness.errors import HarnessError
from harness.files import read_plain
from harness.record.archive import archive_of, read_archive, write_archive

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
