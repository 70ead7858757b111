"""The diagram of a run in CONTRIBUTING.md is what the processes of a real comparison call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.cli.command_line import SHORT

pytestmark = pytest.mark.long(seconds=15)

ROOT = Path(__file__).resolve().parents[2]
HEADING = "### From `compare` to `record.json`"
WITNESS = ROOT / "tests" / "docs" / "call_witness.py"


def drawn() -> set[tuple[str, str]]:
    """Caller and callee of each line of the diagram."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split(HEADING)[1]
    above: list[str] = []
    edges = set()
    for line in text.split("```text\n")[1].split("```")[0].splitlines():
        if "." not in line:
            continue  # the name of a process, or a blank line
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.split()[0]]
        if depth:
            edges.add((above[depth - 1], above[depth]))
    return edges


@pytest.mark.exhaustive
def test_the_diagram_shows_real_calls(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    words = ["compare", "--backends", "ddp", "--nproc", "1", *SHORT, "--runs", "runs"]
    done = subprocess.run(
        [sys.executable, str(WITNESS), str(calls), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    seen = {tuple(line.split()) for line in calls.read_text().splitlines()}
    edges = drawn()
    assert len(edges) > 30
    assert sorted(edges - seen) == []
