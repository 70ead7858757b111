"""A person who waits at a terminal reads a word before libraries load that take seconds."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .command_line import environment

SLOW = {"accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "torch", "transformers"}
"""Libraries whose import takes from a tenth of a second to several."""


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
        [sys.executable, "-X", "importtime", "-m", "harness", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment(), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    loaded = set()
    try:
        with open(ours, closefd=False, errors="replace") as terminal:
            for line in terminal:
                if not line.startswith("import time:"):
                    break
                loaded.add(line.rpartition("|")[2].strip().partition(".")[0])
        assert line.strip()
        assert not line.startswith("harness: ")
        assert "pydantic" in loaded, "imports are not listed before the word"
        assert not loaded & SLOW
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
