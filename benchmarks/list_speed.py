"""Measures `harness list`, `show` and a CSV report of many runs against `json` reading the same files.

The records are those of a folder, under other run ids: `python benchmarks/list_speed.py RUNS --count 5000`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import measuring
from tabulate import tabulate

READ = """
import json, pathlib, sys
kept = [json.loads(path.read_bytes()) for path in pathlib.Path(sys.argv[1]).glob("*/record.json")]
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of runs whose records are multiplied")
    parser.add_argument("--count", type=int, default=5000)
    options = parser.parse_args()
    found = {path.parent.name: path.read_text() for path in sorted(options.runs.glob("*/record.json"))}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        runs = Path(place) / "runs"
        for number, (run, text) in enumerate(islice(cycle(found.items()), options.count)):
            (runs / f"run-{number:06}").mkdir(parents=True)
            (runs / f"run-{number:06}/record.json").write_text(text.replace(run, f"run-{number:06}"))
        harness = measuring.harness_command()
        commands = {
            "json": [sys.executable, "-c", READ, str(runs)],
            "list, the first time": [*harness, "list", "--runs", str(runs)],
            "list": [*harness, "list", "--runs", str(runs)],
            "show": [*harness, "show", "--runs", str(runs)],
            "report -o r.csv": [*harness, "report", str(runs), "-o", f"{place}/r.csv"],
        }
        rows = []
        for name, command in commands.items():
            seconds, most = _cost(command)
            first = rows[0] if rows else [name, seconds, most]
            rows.append([name, seconds, most, seconds / first[1], most / first[2]])
            measuring.progress(f"list speed: {name}: {seconds:.1f} s, {most} MiB")
    headers = ["command", "processor s", "MiB", "s / json", "MiB / json"]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=".2f"))
    return 0


def _cost(command: Sequence[str]) -> tuple[float, int]:
    """Processor seconds and largest resident set in MiB, by a process that starts nothing else."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    seconds, most = done.stdout.split()
    return float(seconds), int(most)


if __name__ == "__main__":
    sys.exit(main())
