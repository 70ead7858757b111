"""Namespaces of one's own, and what a comparison left behind in them: every process, port and piece of shared
memory there is its."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.wire.loopback import bring_up

INSIDE_VARIABLE = "FAULTS_INSIDE"
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")


def command_inside(arguments: Sequence[str]) -> list[str]:
    """The words that run `python ARGUMENTS` in new namespaces."""
    return [*UNSHARE, "env", f"{INSIDE_VARIABLE}=1", sys.executable, *arguments]


def is_inside() -> bool:
    return INSIDE_VARIABLE in os.environ


def furnish() -> None:
    """Bring the loopback interface up, and mount shared memory that is empty."""
    bring_up("lo")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


@cache
def why_not() -> str | None:
    """Why namespaces cannot be had here; None if they can."""
    try:
        done = subprocess.run(command_inside(["-c", "pass"]), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["unshare failed"])[-1]


PATIENCE_SECONDS = 5.0
"""Within these everything that a killed process started is gone."""
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
KEPT = ("torchinductor_", "torchelastic_")
"""Prefixes of what torch keeps on purpose: a cache, and the logs of torchrun."""
OF_A_RUN = ("launcher.json", "checkpoint", "initial-weights")
"""In a run's folder while it runs."""


def leftovers(runs: Path, temporary: Path) -> list[str]:
    """Processes, shared memory, ports, temporary files and unfinished files, in words."""
    names = [path.name for path in temporary.iterdir() if not path.name.startswith(KEPT)]
    return [*left_by_processes(), *(f"temporary {name}" for name in names), *_files(runs)]


def left_by_processes() -> list[str]:
    """What must be gone whatever died first, without the next command's help."""
    found: list[str] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = [line for look in (_processes, _shared_memory, _ports) for line in look()]
        if not found:
            break
        time.sleep(0.1)
    return found


def _processes() -> list[str]:
    mine = {1, os.getpid()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        if process not in mine and (name := _living(folder)):
            found.append(f"process {name}")
    return found


def _living(process: Path) -> str:
    """Its name; empty if it has ended: nobody here reaps the orphans of a killed command."""
    try:
        name, _, rest = (process / "stat").read_text().partition(" ")[2].rpartition(") ")
    except OSError:
        return ""
    return "" if rest.startswith("Z") else name.removeprefix("(")


def _shared_memory() -> list[str]:
    return [f"shared memory {path.name}" for path in Path("/dev/shm").iterdir()]


def _ports() -> list[str]:
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return [f"port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == LISTENING]


def _files(runs: Path) -> list[str]:
    hidden = list(runs.rglob(".*"))
    unfinished = [path for path in runs.glob("*/*") if path.name in OF_A_RUN and path.stat().st_size]
    return [f"file {path.relative_to(runs)}" for path in [*hidden, *unfinished]]
