"""A file system of a few megabytes that fills up while a comparison runs, or before its report is written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.survival.comparisons import Ended, end, start, table_faults

MEGABYTES = 8


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs, which only root can mount."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError), (folder / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(b"0")


def disk_faults(folder: Path, moment: float, undisturbed: Ended) -> tuple[str, list[str]]:
    """What goes wrong when the disk is full after so many seconds, then in a report, then with room again."""
    with small_disk(folder) as disk:
        runs = disk / "runs"
        process = start(runs)
        time.sleep(moment)
        before = _records(runs)
        fill(disk)
        ended = end(process)
        faults = [] if ended.code in (0, 1) else [f"exit {ended.code}"]
        faults += ["a traceback"] if ended.has_traceback else []
        if ended.code == 1 and not ended.lines[-1].startswith("harness: "):
            faults.append(f"no clear error: {ended.lines[-1:]}")
        faults += [f"{path} changed" for path, data in before.items() if path.read_bytes() != data]
        faults += _report_faults(disk, before)
        (disk / "ballast").unlink()
        again = end(start(runs))
        faults += [f"exit {again.code} with room: {again.lines[-1:]}"] if again.code else []
        faults += table_faults(again, undisturbed)
        last = ended.lines[-1].replace(str(folder), "DISK") if ended.lines else ""
    return f"full after {moment:.1f} s, {len(before)} records, exit {ended.code}, {last!r}", faults


def _report_faults(disk: Path, before: dict[Path, bytes]) -> list[str]:
    """A report that does not fit."""
    report = disk / "report.md"
    if not before:
        return []
    done = subprocess.run(
        [sys.executable, "-m", "harness", "report", str(disk / "runs"), "-o", str(report)],
        capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1:]
    faults = [] if done.returncode == 1 and "No space left" in "".join(last) else [f"report: {last}"]
    faults += [f"{report.name} is there"] if report.exists() else []
    return faults + [f"report changed {path}" for path, data in before.items() if path.read_bytes() != data]


def _records(runs: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in runs.glob("*/record.json")}
