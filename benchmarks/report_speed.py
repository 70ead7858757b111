"""Measures time and memory of `harness report` on 1,000 records of 500 steps, and on fewer of them.

Judges the minimum of the processor time over several runs, because other work on the machine or its host only
adds to it. The time that Python's `json` takes to read the same files shows how fast the host currently is.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import measuring
import report_records

MOST_SECONDS = 10.0
MOST_OVER_JSON = 2.0
MOST_BYTES = 2**30
MOST_GROWTH = 1.15
"""Seconds for 1,000 records over the extrapolation from 100 and 550 records: 1 is linear."""
STEPS = 500
COUNTS = (100, 550, 1000)
ROUNDS = 5


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each record")
    options = parser.parse_args()
    return measuring.present(measure(options.steps), as_json=options.json)


def measure(steps: int = STEPS) -> list[measuring.Result]:
    """Seconds, bytes and growth, each over its target.

    The sizes alternate, because the speed of a shared host drifts from minute to minute.
    """
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    over_json, peak = [], 0
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        runs = {count: Path(folder) / f"runs-{count}" for count in COUNTS}
        for count in COUNTS:
            report_records.write_records(runs[count], count, steps)
        for number in range(1, ROUNDS + 1):
            for count in COUNTS:
                took, most = report(runs[count], Path(folder) / "report.md")
                seconds[count].append(took)
                peak = max(peak, most)
            over_json.append(seconds[COUNTS[-1]][-1] / json_seconds(runs[COUNTS[-1]]))
            took_all = ", ".join(f"{seconds[count][-1]:.1f}" for count in COUNTS)
            measuring.progress(f"report speed: round {number}: {took_all} s for {COUNTS} records")
    few, middle, many = (min(seconds[count]) for count in COUNTS)
    growth = many / (middle + (middle - few))
    of_many = [took / MOST_SECONDS for took in seconds[COUNTS[-1]]]
    json_detail = f"{statistics.median(over_json):.2f} times as long as `json` takes to read them"
    return [
        _result("report seconds", min(of_many), 1.0, f"{many:.1f} s of processor time", of_many),
        _result("report over json", statistics.median(over_json), MOST_OVER_JSON, json_detail, over_json),
        _result("report memory", peak / MOST_BYTES, 1.0, f"{peak / 2**20:.0f} MiB"),
        _result("report growth", growth, MOST_GROWTH, f"{few:.1f}, {middle:.1f}, {many:.1f} s for {COUNTS}"),
    ]


def report(runs: Path, output: Path) -> tuple[float, int]:
    """Processor seconds of the command, and the largest resident set of all commands so far, in bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*measuring.harness_command(), "report", str(runs), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_maxrss * 1024


def json_seconds(runs: Path) -> float:
    """Processor seconds of this process to read all records as plain lists and dictionaries."""
    before = time.process_time()
    for path in runs.glob("*/record.json"):
        json.loads(path.read_bytes())
    return time.process_time() - before


def _result(
    name: str, ratio: float, target: float, detail: str, single: Sequence[float] = ()
) -> measuring.Result:
    lowest, highest = min(single, default=ratio), max(single, default=ratio)
    return measuring.Result(
        name=name, ratio=ratio, lowest=lowest, highest=highest, target=target, detail=detail
    )


if __name__ == "__main__":
    sys.exit(main())
