"""The command, in this process or in one of its own, and jobs that are over in seconds."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner

from harness import cli
from harness.launch import STOPPING
from harness.record import Record
from harness.record.store import read_record
from tests.forkserver import launcher
from tests.patience import SECONDS

INTERRUPTED = 130
HARNESS = [sys.executable, "-m", "harness"]
SMALL_MODEL = (
    "model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2}"
)
SMALL = ["--set", SMALL_MODEL, "--set", "data.sequence_length=32"]
UNTRACED = ["--set", "measure.traced_steps=0"]
"""The profiler takes longer to start and to read than all steps of a short run."""
SHORT = [
    *SMALL, *UNTRACED, "--set", "training.steps=4", "--set", "measure.warmup_steps=1", "--set",
    "measure.probed_steps=1",
]  # fmt: skip
LONG = [*SMALL, "--set", "training.steps=1000000"]


def environment(**changes: str) -> dict[str, str]:
    set_by_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    return kept | changes


def harness(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In this process, whose fork server has all imports behind it."""
    words = [*map(str, arguments)]
    launcher()
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    variables = patch.dict(os.environ, environment(), clear=True)
    try:
        with chdir(cwd), variables, patch.object(sys, "argv", ["harness", *words]):
            done = CliRunner().invoke(cli.harness, words, prog_name="harness")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if done.exit_code == INTERRUPTED:  # who waits for the tests meant them all
        raise KeyboardInterrupt
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def succeeds(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same of a command that must exit with 0."""
    done = harness(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def harness_process(
    *arguments: str | Path, cwd: Path, started: Mapping[str, Any] = MappingProxyType({}), **variables: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with these environment variables, started by `subprocess` with `started`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(
        [*HARNESS, *map(str, arguments)], cwd=cwd, env=environment(**variables), text=True, timeout=SECONDS,
        check=False, **(streams | dict(started)),
    )  # fmt: skip


def records(runs: Path) -> list[Record]:
    """The records of a folder; every run folder must have a whole one."""
    return [read_record(folder / "record.json") for folder in sorted(runs.glob("*")) if folder.is_dir()]


def refused(folder: Path, *arguments: str | Path, **variables: str) -> str:
    """The one line on standard error; with `variables` whatever a real process writes there."""
    run = harness_process if variables else harness
    done = run(*arguments, cwd=folder, **variables)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("harness: ")
    assert "Traceback" not in done.stderr
    assert "unexpected" not in lines[0]
    assert (done.stdout, done.returncode) == ("", 1)
    records(folder / "runs")  # raises on half a run
    return lines[0]
