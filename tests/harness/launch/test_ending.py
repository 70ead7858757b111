"""What a rank started ends with its run, in whatever session it is."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.patience import SECONDS

STARTS = """\
import os, subprocess, sys, time
from harness.launch.ending import leaving_none_behind

spared = subprocess.Popen(["sleep", "600"])
with leaving_none_behind():
    rank = os.fork()
    if rank == 0:
        own = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            open("daemon.part", "w").write(str(os.getpid()))
            os.rename("daemon.part", "daemon")
            time.sleep(600)
        while not os.path.exists("daemon"):
            time.sleep(0.01)
        open("own", "w").write(str(own.pid))
        os._exit(0)
    os.waitpid(rank, 0)
print(spared.poll())
spared.kill()
"""


def test_daemons_and_sessions_of_their_own_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert done.stdout == "None\n"
    for name in ("own", "daemon"):
        number = int((tmp_path / name).read_text())
        deadline = time.monotonic() + SECONDS
        while psutil.pid_exists(number) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(number)
