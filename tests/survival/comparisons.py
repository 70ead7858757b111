"""A small comparison of real ranks, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
