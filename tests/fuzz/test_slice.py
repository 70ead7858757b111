"""The guard that judges inputs sees what it is for; `make fuzz` takes 20,000 inputs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long(seconds=15)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.costly
def test_inputs_of_every_way_in_are_read_or_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--inputs", "60", "--seed", "0"], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "61 inputs, seed 0" in done.stdout  # shares are rounded


def test_guard_sees_what_it_is_for(tmp_path: Path) -> None:
    """A traceback, an endless loop, a file outside, a shell, and an error of two lines are each named."""
    script = f"""
import os, subprocess
from pathlib import Path
from harness.errors import HarnessError
from tests.fuzz import guard
guard.SECONDS = 0.2
folder = Path({str(tmp_path / "inside")!r})
folder.mkdir()
watch = guard.Guard(folder)
def loop():
    while True: pass
def refuse():
    error = HarnessError("a")
    error.args = ("a\\nb",)
    raise error
for work in (
    lambda: 1 / 0, loop, lambda: Path({str(tmp_path / "outside")!r}).write_text("x"),
    lambda: os.system("true"), lambda: subprocess.run("true", shell=True), refuse, lambda: None,
    lambda: (folder / "own").write_text("x"),
):
    print(watch.judge(work)[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "traceback", "hang", "outside", "outside", "outside", "not one line", "result", "result",
    ]  # fmt: skip
    assert not (tmp_path / "outside").exists()
