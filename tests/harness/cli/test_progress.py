"""Lines about the steps of a run, and the progress of a comparison, on a terminal and without one."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from harness.cli.output import MatrixProgress, Progress, View, duration
from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.run_directory.events import StepEvent
from harness.run_directory.request import RunRequest
from tests.fake_ranks import STEP
from tests.harness.run_directory.test_events import setup_event
from tests.records import make_effective


@pytest.mark.parametrize(
    ("device_name", "words"),
    [
        ("NVIDIA H100", "loss 10.0000 (rank 0), 1,600 tokens/s"),
        ("CUDA stub", "loss 10.0000 (rank 0)"),
        ("CUDA stub NVIDIA H100", "loss 10.0000 (rank 0)"),
    ],
)
def test_a_stub_has_no_tokens_per_second(
    device_name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("ddp", 2, io.StringIO(), plain_lines=True)
    progress(setup_event(make_effective(), device_name=device_name))
    progress(StepEvent(step=0, seconds=0.01, **STEP))
    assert capsys.readouterr().err == f"ddp: step 1/2, {words}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def one_cell() -> RunRequest:
    return plan(load_experiment(None, ["compare.noise_runs=false"]), ["ddp"], [2], 1, "cpu")[-1]


def run(stream: Any, view: View) -> None:
    progress = MatrixProgress(2, stream, view)
    for text in ("ddp: ok", "zero3: ok"):
        cell = one_cell()
        progress.begin(cell)
        time.sleep(0.01)
        progress.end(cell.key, text)
    progress.close()


def test_lines_say_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    run(io.StringIO(), View())
    assert capsys.readouterr().err == "[1/2] ddp: ok; about 0 s left\n[2/2] zero3: ok\n"


def test_runs_that_are_under_way_count_in_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells that take turns end together: after the first none is as long as it was."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = MatrixProgress(2, io.StringIO(), View())
    progress.begin(one_cell())
    progress(setup_event(make_effective(), steps=4))
    for step in range(3):
        progress(StepEvent(step=step, seconds=0.01, **STEP))
    now = 70.0
    progress.end("another", "zero3: ok")
    assert capsys.readouterr().err == "[1/2] zero3: ok; about 10 s left\n"


def test_a_terminal_has_one_bar_for_all_runs(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    run(stream, View())
    assert "1.0/2 runs" in stream.getvalue()
    assert capsys.readouterr().err == "[1/2] ddp: ok\n[2/2] zero3: ok\n"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    run(stream, View(quiet=True))
    assert (stream.getvalue(), capsys.readouterr().err) == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (720, "12 min"), (12_600, "3.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
