"""Measures the record of a run of 64 ranks and 1,000 steps: its size, and how long writing it takes.

The events are those of a small real run, multiplied (`scaled_run.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measuring
import scaled_run

from harness.record.store import read_record, write_record
from harness.run_directory.assemble import Outcome, assemble

RANKS = 64
STEPS = 1000
MOST_BYTES = 20e6
MOST_SECONDS = 10.0
ROUNDS = 3
RUN = ("run", "--backend", "zero3", "--nproc", "2", "--set", "runtime.device=cpu", "--force")


def main() -> int:
    options = measuring.options(__doc__).parse_args()
    return measuring.present(measure(), as_json=options.json)


def measure() -> list[measuring.Result]:
    """Bytes and seconds, each over its limit."""
    took, reading, events, size = [], [], 0, 0
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        runs, target = Path(folder) / "runs", Path(folder) / "scaled"
        command = [*measuring.harness_command(), *RUN, "--runs", str(runs)]
        subprocess.run(command, check=True, capture_output=True)
        (source,) = runs.iterdir()
        target.mkdir()
        request = scaled_run.scale_run(source, target, RANKS, STEPS)
        events = sum(path.stat().st_size for path in target.glob("*.jsonl"))
        for number in range(1, ROUNDS + 1):
            begin = time.perf_counter()
            record = assemble(target, request, Outcome(exit_codes=dict.fromkeys(range(RANKS), 0)))
            path = write_record(target, record)
            took.append(time.perf_counter() - begin)
            size = path.stat().st_size
            begin = time.perf_counter()
            read_record(path)
            reading.append(time.perf_counter() - begin)
            measuring.progress(f"record size: round {number}: {took[-1]:.1f} s, {size / 1e6:.1f} MB")
    detail = f"{took[0]:.1f} s from {events / 1e6:.1f} MB of events, read again in {min(reading):.1f} s"
    seconds = [own / MOST_SECONDS for own in took]
    return [
        _result("record bytes", size / MOST_BYTES, f"{size / 1e6:.1f} MB", [size / MOST_BYTES]),
        _result("record seconds", max(seconds), detail, seconds),
    ]


def _result(name: str, ratio: float, detail: str, ratios: list[float]) -> measuring.Result:
    return measuring.Result(
        name=name, ratio=ratio, lowest=min(ratios), highest=max(ratios), target=1.0, detail=detail
    )


if __name__ == "__main__":
    sys.exit(main())
