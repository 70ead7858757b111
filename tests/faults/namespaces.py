"""Namespaces of one's own, in which every process, port and piece of shared memory belongs to the faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

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
