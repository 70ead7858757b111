"""Comparisons on real ranks, of a tiny model, for what they say of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.record import Record
from harness.store import read_runs

ROOT = Path(__file__).parents[2]
BLOOM = "{model_type: bloom, hidden_size: 40, n_layer: 3, n_head: 4}"
LLAMA = (
    "{hidden_size: 36, intermediate_size: 52, num_hidden_layers: 3, num_attention_heads: 3, "
    "num_key_value_heads: 3}"
)
SETTINGS = (
    "training.steps=4", "measure.warmup_steps=1", "measure.counted_steps=3", "measure.traced_steps=0",
    "measure.weight_digests=false", "data.sequence_length=16", "training.global_batch_size=8",
)  # fmt: skip
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """What a comparison said, and its records by backend."""

    document: dict[str, Any]
    records: dict[str, Record]

    def findings(self, name: str) -> list[dict[str, Any]]:
        return [finding for finding in self.document["findings"] if finding["id"] == name]


def compare(
    folder: Path, backends: str, ranks: int, *settings: str, entry_points: dict[str, str] | None = None
) -> Outcome:
    """Run `harness compare --json`; `entry_points` registers further backends for it."""
    paths = [str(ROOT)]
    if entry_points:
        info = folder / "planted-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        lines = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
        (info / "entry_points.txt").write_text(f"[harness.backends]\n{lines}")
        paths.append(str(folder))
    variables = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "harness", "compare", "--json", "--backends", backends]
    command += ["--nproc", str(ranks), "--runs", str(folder / "runs")]
    for setting in (*SETTINGS, *settings):
        command += ["--set", setting]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    runs, problems = read_runs([folder / "runs"])
    assert problems == []
    return Outcome(json.loads(done.stdout), {record.backend.label: record for _, record in runs})
