"""A person who waits at a terminal reads a word within a second, before libraries load."""

import contextlib
import os
import pty
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from .command_line import HARNESS, environment

MOST_PROCESSOR_SECONDS = 1.0
"""Of the command until its first word: on a free machine as long, and other programs hardly change it."""


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--backends", "ddp"], ["run", "--backend", "ddp"],
        ["simulate", "--backends", "fsdp", "--world-size", "8"], ["estimate", "--model", "bloom-560m"],
        ["labs", "run", "custom-gpt", "--scale", "tiny"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_the_first_word_comes_before_libraries_load(words: list[str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*HARNESS, *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        word = os.read(ours, 100).decode().strip()
        assert word
        assert not word.startswith("harness: ")
        times = psutil.Process(process.pid).cpu_times()
        assert times.user + times.system < MOST_PROCESSOR_SECONDS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
