"""Real processes of the command, and jobs that are over in seconds."""

import os
import subprocess
import sys
from pathlib import Path

from harness.record import Record
from harness.store import read_record

HARNESS = [sys.executable, "-m", "harness"]
SMALL_MODEL = (
    "model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2}"
)
SMALL = ["--set", SMALL_MODEL, "--set", "data.sequence_length=32"]
SHORT = [
    *SMALL, "--set", "training.steps=4", "--set", "measure.warmup_steps=1", "--set",
    "measure.counted_steps=1",
]  # fmt: skip
LONG = [*SMALL, "--set", "training.steps=1000000"]


def environment(**changes: str) -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"HF_HUB_OFFLINE": "1"} | changes


def harness(
    *arguments: str | Path, cwd: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HARNESS, *map(str, arguments)], cwd=cwd, env=environment(**(variables or {})),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def records(runs: Path) -> list[Record]:
    """The records of a folder; every run folder must have a whole one."""
    return [read_record(folder / "record.json") for folder in sorted(runs.glob("*")) if folder.is_dir()]


def refused(folder: Path, *arguments: str | Path, **variables: str) -> str:
    done = harness(*arguments, cwd=folder, variables=variables)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("harness: ")
    assert "Traceback" not in done.stderr
    assert "unexpected" not in lines[0]
    assert done.stdout == ""
    assert done.returncode == 1
    records(folder / "runs")  # raises on half a run
    return lines[0]
