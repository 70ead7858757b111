"""How long tests wait for what must come: it ends a wait that would have no end, on the busiest machine."""

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

SECONDS = 300.0
T = TypeVar("T")


def until(condition: Callable[[], T], process: "subprocess.Popen[Any] | None" = None) -> T:
    """What the condition gives as soon as it holds.

    Raises AssertionError if it never does, or not before `process` has ended.
    """
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert process is None or process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"waited {SECONDS:g} s"
        time.sleep(0.02)
    return found
