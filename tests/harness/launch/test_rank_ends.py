"""A rank's end is noted beside it, and a rank that is told to end speaks first."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.run_directory.request import rank_exit
from tests.patience import SECONDS

MONITORED = """
import os, signal, sys, time
from pathlib import Path
from harness.launch.external import supervise
folder = Path(sys.argv[1])
def main(tell):
    tell(folder.name)
    Path(folder, "pid").write_text(str(os.getpid()))
    {body}
supervise(3, 4, folder.parent, main).leave()
"""
TELLING = """
import threading, sys
from pathlib import Path
from harness.rank.process.start import SignalThread
SignalThread().on_termination(lambda: Path(sys.argv[1], "told").write_text("yes"))
Path(sys.argv[1], "pid").touch()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # the main thread never comes back
"""


def start(script: str, folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    deadline = time.monotonic() + SECONDS
    while not (folder / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("body", "noted", "left"),
    [
        ("return 0", 0, 0),
        ("return 7", 7, 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 137),
        ("os.abort()", -6, 134),
    ],
)
def test_the_end_of_a_rank_is_noted(body: str, noted: int, left: int, tmp_path: Path) -> None:
    process = start(MONITORED.format(body=body), tmp_path)
    assert process.wait(SECONDS) == left
    note = json.loads(rank_exit(tmp_path, 3).read_text())
    assert note["exit_code"] == noted
    assert note["max_resident_bytes"] > 0


def test_a_request_to_end_reaches_the_rank(tmp_path: Path) -> None:
    process = start(MONITORED.format(body="time.sleep(60)"), tmp_path)
    process.terminate()
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert json.loads(rank_exit(tmp_path, 3).read_text())["exit_code"] == -signal.SIGTERM


def test_a_rank_does_not_outlive_its_monitor(tmp_path: Path) -> None:
    process = start(MONITORED.format(body="time.sleep(60)"), tmp_path)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "pid").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait(SECONDS)
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return  # dead, and nobody reaps orphans in this container
        time.sleep(0.02)
    pytest.fail(f"process {child} lives on")


def test_a_stuck_rank_still_tells_before_it_ends(tmp_path: Path) -> None:
    process = start(TELLING, tmp_path)
    process.terminate()
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert (tmp_path / "told").read_text() == "yes"
