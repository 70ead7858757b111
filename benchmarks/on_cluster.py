"""What the benchmarks on a cluster share: one job at a time, and rounding measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
