"""What the benchmarks on a cluster share: one job at a time, records and reports kept to be published."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.record import Record
from harness.store import read_record
from tests.cluster.matrices import render
from tests.cluster.slurm import SlurmCluster

FLOOR = ("--set", "compare.floor=true")
"""The reference runs once more with the batch in other pieces: what rounding is, is measured."""
MATRIX_SECONDS = 3600.0
"""A matrix of many cells takes minutes on an idle machine, and far longer on a busy one."""


def run_matrix(cluster: SlurmCluster, folder: Path, runs: Path, *words: str, steps: int) -> None:
    """Render with these words into `folder` and run each cell alone; records are added to `runs`."""
    # Records keep the command line: a relative path says nothing of this machine.
    matrix = render(cluster, folder, "--runs", os.path.relpath(runs, folder), *words, steps=steps)
    # One job at a time: two would share the processors.
    path = matrix.folder / "jobs" / "matrix.json"
    document = json.loads(path.read_text())
    document["site"]["max_queued_jobs"] = 1
    path.write_text(json.dumps(document))
    matrix.harness("submit", "--wait", "--poll-seconds", "0.5", timeout=MATRIX_SECONDS)


def keep(runs: Path, output: Path) -> list[Record]:
    """Copy the records to `output`/runs, and write and verify reports of them there.

    Ends the program if a run failed: nothing is published then.
    """
    records = []
    for path in sorted(runs.glob("*/record.json")):
        record = read_record(path)
        if record.status not in ("ok", "unsupported"):
            raise SystemExit(f"{record.run_id}: {record.status}: {record.error}")
        target = output / "runs" / record.run_id
        target.mkdir(parents=True)
        shutil.copy(path, target)
        records.append(record)
    for name in ("report.md", "report.html"):
        for words in (["report", "runs", "-o", name], ["verify", name]):
            subprocess.run([sys.executable, "-m", "harness", *words], cwd=output, check=True)
    return records
