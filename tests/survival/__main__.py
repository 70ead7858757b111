"""`python -m tests.survival KIND`: how comparisons end that are killed, share a folder, or fill a disk.

KIND is kills, pairs or disk. Exits with 1 if one ended otherwise than it must.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.record.store import read_record

BACKENDS = "ddp,zero3,fsdp"
SETTINGS = (
    "training.steps=6", "training.global_batch_size=4", "compare.noise_runs=false", "data.sequence_length=32",
    "model.config={hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2}",
)  # fmt: skip
OF_A_RUN = ("run_id", "host_peak_bytes", "peak_bytes")
"""Columns that differ between two runs of one cell, besides timings: when gloo's threads free their buffers
moves the peak, by 768 bytes in one of 16 undisturbed runs, by up to 160 KiB beside other work."""
PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Ended:
    """How a comparison ended."""

    code: int
    table: list[dict[str, Any]]
    """Its rows without what differs between two runs of one cell; empty: it printed none."""
    lines: list[str]
    """Of its standard error."""

    @property
    def has_traceback(self) -> bool:
        return any(line.startswith("Traceback") or "unexpected " in line for line in self.lines)


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begin a comparison whose records go to `runs`."""
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    return subprocess.Popen(
        [
            sys.executable, "-m", "harness", "compare", "--backends", BACKENDS, "--nproc", "2", *sets,
            "--json", "--runs", str(runs), "--force", *arguments,
        ],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait for it. Raises subprocess.TimeoutExpired."""
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    rows = json.loads(out)["rows"] if out.strip() else []
    return Ended(process.returncode, [_without_timings(row) for row in rows], err.splitlines())


def table_faults(ended: Ended, undisturbed: Ended) -> list[str]:
    """Where a table differs from that of a comparison that nothing disturbed."""
    if len(ended.table) != len(undisturbed.table):
        return [f"{len(ended.table)} rows"]
    return [
        f"{one['backend']}: {key} is {one[key]}, not {other[key]}"
        for one, other in zip(ended.table, undisturbed.table, strict=True)
        for key in one
        if one[key] != other[key]
    ]


def _without_timings(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in row.items()
        if key not in OF_A_RUN and not key.endswith(("seconds", "per_second"))
    }


def faults_of_folder(runs: Path) -> list[str]:
    """What a folder must not have: unreadable records, cells that succeeded twice, files that were left."""
    found = []
    succeeded: Counter[str] = Counter()
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        if not (folder / "record.json").is_file():
            found.append(f"{folder.name} has no record")
            continue
        record = read_record(folder / "record.json")
        succeeded[record.cell] += record.status == "ok"
    found += [f"cell {cell} ran {count} times" for cell, count in succeeded.items() if count > 1]
    return found + [f"{path.name} was left" for path in runs.rglob(".*")]


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


TRIALS = {"kills": 20, "pairs": 10, "disk": 10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=TRIALS)
    parser.add_argument("--trials", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="survival-") as name:
        began = time.monotonic()
        undisturbed = end(start(Path(name) / "undisturbed"))
        seconds = time.monotonic() - began
        say(f"undisturbed: exit {undisturbed.code}, {len(undisturbed.table)} rows in {seconds:.0f} s")
        for number in range(given.trials or TRIALS[given.kind]):
            folder = Path(name) / str(number)
            if given.kind == "kills":
                moment = chance.uniform(0.02, 0.98) * seconds
                what, faults = f"killed after {moment:.1f} s", faults_of_kill(folder, moment, undisturbed)
            elif given.kind == "pairs":
                delay = chance.uniform(0, 0.5) * seconds
                what, faults = f"second after {delay:.1f} s", faults_of_pair(folder, delay, undisturbed)
            else:
                moment = chance.uniform(0.05, 0.95) * seconds
                what, faults = disk_faults(folder, moment, undisturbed)
            bad += bool(faults)
            say(f"{number + 1}: {what}: {'; '.join(faults) or 'as it must'}")
    say(f"{given.kind}: seed {given.seed}, {bad} ended otherwise than they must")
    return 1 if bad or undisturbed.code else 0


def faults_of_kill(runs: Path, moment: float, undisturbed: Ended) -> list[str]:
    """What goes wrong when a comparison is killed after so many seconds, and called again."""
    process = start(runs)
    try:
        process.wait(timeout=moment)
    except Exception:
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    else:
        started = []
    end(process)
    faults = _differences(end(start(runs)), undisturbed)
    psutil.wait_procs(started, timeout=10)
    faults += [f"process {child.pid} was left" for child in started if child.is_running()]
    return faults + faults_of_folder(runs)


def faults_of_pair(runs: Path, delay: float, undisturbed: Ended) -> list[str]:
    """What goes wrong when a second comparison of the same cells begins after so many seconds."""
    first = start(runs)
    time.sleep(delay)
    second = start(runs)
    faults = [fault for process in (first, second) for fault in _differences(end(process), undisturbed)]
    return faults + faults_of_folder(runs)


def _differences(ended: Ended, undisturbed: Ended) -> list[str]:
    faults = [f"exit {ended.code}: {ended.lines[-1:]}"] if ended.code else []
    faults += ["a traceback"] if ended.has_traceback else []
    return faults + table_faults(ended, undisturbed)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
