"""A network namespace of its own for each measurement."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.markdown import ROOT
from tests.harness.cli.command_line import environment
from tests.patience import SECONDS

ALONE = ("unshare", "-rn", sys.executable, "-m", "tests.wire.loopback", sys.executable)
OF_LOOPBACK = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="package")
def measured() -> Callable[..., Any]:
    """What a function of `measured.py` returns in a fresh namespace."""
    tried = subprocess.run([*ALONE, "-c", "pass"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tried.returncode:
        # Many containers forbid it, and nothing else here can count what one job alone sends.
        pytest.skip(f"no network namespace here: {tried.stderr}")

    def ask(function: str, *arguments: object) -> Any:
        done = subprocess.run(
            [*ALONE, "-m", "tests.wire.measured", function, json.dumps(arguments)], cwd=ROOT, check=False,
            env=environment(**OF_LOOPBACK), capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask
