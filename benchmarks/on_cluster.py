"""Shared by the benchmarks on a cluster: runs a matrix one job at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cluster.matrices import render
from tests.cluster.slurm import SlurmCluster

NOISE_RUNS = ("--set", "compare.noise_runs=true")
"""Runs the reference again with another split of the batch, which measures rounding."""
MATRIX_SECONDS = 3600.0
"""A matrix of many cells takes minutes on an idle machine and far longer on a busy one."""


def run_matrix(cluster: SlurmCluster, folder: Path, runs: Path, *words: str, steps: int) -> None:
    """Render with these arguments into `folder` and run one cell at a time; adds records to `runs`."""
    # Records keep the command line; a relative path reveals nothing about this machine.
    matrix = render(cluster, folder, "--runs", os.path.relpath(runs, folder), *words, steps=steps)
    # One job at a time: two would share the processors.
    path = matrix.folder / "jobs" / "matrix.json"
    document = json.loads(path.read_text())
    document["site"]["max_queued_jobs"] = 1
    path.write_text(json.dumps(document))
    matrix.harness("submit", "--wait", timeout=MATRIX_SECONDS)
