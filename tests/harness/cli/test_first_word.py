"""Who waits reads a word before libraries load that take seconds, or a second after the start."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.cli import WORKING_AFTER, is_silent, working
from harness.cli.output import echo
from tests.harness.cli.command_line import HARNESS, environment
from tests.representatives import first

FEW = [["compare", "--backends", "ddp"], ["estimate", "--model", "bloom-560m"]]
SLOW = {"accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "torch", "transformers"}
"""Libraries whose import takes from a tenth of a second to several."""


@pytest.mark.parametrize(
    "words",
    first(FEW, [
        *FEW, ["run", "--backend", "ddp"], ["simulate", "--backends", "fsdp", "--world-size", "8"],
        ["labs", "run", "custom-gpt", "--scale", "tiny"],
    ]),
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


def test_a_command_that_is_silent_says_that_it_works(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*HARNESS, "observe", "--", sys.executable, "-c", "input()"], cwd=tmp_path, text=True,
        env=environment(**{WORKING_AFTER: "0.01"}), stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "harness observe: working\n"
    process.communicate("\n")


@pytest.mark.parametrize(
    ("words", "silent"),
    [
        (["fit", "--help"], True), (["estimate", "-h"], True), (["run", "-q"], True), (["nothing"], True),
        (["fit", "--backend", "fsdp"], False), (["observe", "--", "train.py", "--help"], False),
    ],
)  # fmt: skip
def test_help_and_quiet_commands_do_not_say_that_they_work(words: list[str], silent: bool) -> None:
    assert is_silent(words) == silent


def test_a_command_that_has_printed_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WORKING_AFTER, "0.01")
    echo("[1/2] ddp: ok", err=True)
    with working("compare"):
        (waiting,) = (thread for thread in threading.enumerate() if thread.name == "working")
        waiting.join()
    assert capsys.readouterr().err == "[1/2] ddp: ok\n"
