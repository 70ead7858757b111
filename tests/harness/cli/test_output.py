"""What reaches a terminal or a pipe: width, progress, first words, readers that leave early."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest

from harness.cli import COMMANDS, WORKING_AFTER, is_silent, output, working
from harness.cli.output import MatrixProgress, Progress, View, counting_predictors, duration, echo
from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.plan import prediction
from harness.plan.profiles import Tracer
from harness.run_directory.events import StepEvent
from harness.run_directory.request import RunRequest
from harness.tell.formats import WIDTH, fitted, folded
from tests.fake_ranks import STEP
from tests.harness.plan.plans import scenario
from tests.harness.run_directory.test_events import setup_event
from tests.patience import SECONDS
from tests.records import make_effective, make_record, make_steps, written
from tests.representatives import COSTLY, EXHAUSTIVE, first

from .command_line import HARNESS, environment, harness, harness_process, succeeds


def test_reader_that_left_ends_nothing(tmp_path: Path) -> None:
    """As `harness run 2>&1 | head -1` does."""
    done = tmp_path / "done"
    code = "from harness.cli.output import echo; [echo('x' * 10000, err=n % 2 == 0) for n in range(20)]; "
    words = [sys.executable, "-c", f"{code}open({str(done)!r}, 'w').close()"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=SECONDS) == 0
    assert done.exists()


def test_full_standard_output_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = harness_process("backends", cwd=tmp_path, started={"stdout": full})
    assert done.returncode == 1
    assert done.stderr == "harness: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("err", [False, True])
def test_whatever_is_printed_holds_neither_secrets_nor_escapes(
    err: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    echo("https://user:hunter22@example.org \x1b[2J", err=err)
    printed = capsys.readouterr()
    assert (printed.err if err else printed.out) == "https://***@example.org \\u001b[2J\n"


class Terminal(io.StringIO):
    """Says when a text was shown so often. is_one: or it is a pipe."""

    def __init__(self, text: str, times: int, *, is_one: bool = True) -> None:
        super().__init__()
        self.is_one = is_one
        self.text, self.left, self.shown = text, times, Event()

    def isatty(self) -> bool:
        return self.is_one

    def write(self, text: str) -> int:
        self.left -= self.text in text
        if self.left <= 0:
            self.shown.set()
        return super().write(text)


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(output, "LINE_EVERY_SECONDS", 0.001)


@pytest.mark.usefixtures("_often")
def test_each_prediction_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal("3 predictions", 1))
    with counting_predictors() as predictors:
        for _ in range(3):
            predictors.speed(scenario("fsdp", 4))
        assert terminal.shown.wait(SECONDS)


@pytest.mark.usefixtures("_often")
def test_the_bar_goes_on_while_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while one model is traced, which takes longer than a second."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal("0 predictions", 5))
    with counting_predictors():
        assert terminal.shown.wait(SECONDS)


@pytest.mark.usefixtures("_often")
def test_while_profiles_are_traced_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "harness: 0 s, tracing the model's activations: 1 prediction so far\n"
    monkeypatch.setattr(sys, "stderr", pipe := Terminal(text, 3, is_one=False))
    monkeypatch.setenv(WORKING_AFTER, "1")
    seen: list[bool] = []

    def trace(*_: object) -> str:
        seen.append(pipe.shown.wait(SECONDS))
        return ""

    monkeypatch.setattr(Tracer, "__call__", trace)
    monkeypatch.setattr(prediction, "predict_memory", lambda _, trace: trace("a request"))
    with counting_predictors() as predictors:
        predictors.memory(scenario("fsdp", 4))
    assert seen == [True]


@pytest.mark.usefixtures("_often")
def test_a_pipe_gets_lines_unless_no_word_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe := Terminal("1 prediction so far", 3, is_one=False))
    with counting_predictors() as predictors:
        predictors.speed(scenario("fsdp", 4))
        assert not pipe.shown.wait(0.1)  # conftest.py wants none
    monkeypatch.setenv(WORKING_AFTER, "1")
    with counting_predictors() as predictors:
        predictors.speed(scenario("fsdp", 4))
        assert pipe.shown.wait(SECONDS)


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


def one_cell() -> RunRequest:
    return plan(load_experiment(None, ["compare.noise_runs=false"]), ["ddp"], [2], 1, "cpu")[-1]


def two_cells(stream: Any, view: View) -> None:
    progress = MatrixProgress(2, stream, view)
    for text in ("ddp: ok", "zero3: ok"):
        cell = one_cell()
        progress.begin(cell)
        time.sleep(0.01)
        progress.end(cell.key, text)
    progress.close()


def test_lines_say_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    two_cells(io.StringIO(), View())
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
    stream = Terminal("", 1)
    two_cells(stream, View())
    assert "1.0/2 runs" in stream.getvalue()
    assert capsys.readouterr().err == "[1/2] ddp: ok\n[2/2] zero3: ok\n"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal("", 1)
    two_cells(stream, View(quiet=True))
    assert (stream.getvalue(), capsys.readouterr().err) == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (720, "12 min"), (12_600, "3.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


LLAMA = ("--model", "llama-3.1-8b", "--gpu", "H100-80", "--fabric", "NDR400")
OPTIONS = "fsdp1:auto_wrap=none,backward_prefetch=post,forward_prefetch=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of long names, one of which failed with a long message."""
    made = tmp_path_factory.mktemp("width")
    command = ["harness", "compare", *["--set", "training.precision=bf16-mixed"] * 8]
    written(
        made / "runs",
        make_record(run_id="20261123-100232-single-n1-r0-0201c6", label="single", world_size=1),
        make_record(run_id="20261123-100319-fsdp1-n2-r0-299849", label=OPTIONS, world_size=2,
                    steps=make_steps(seconds=0.25)).model_copy(update={"command": command}),
        make_record(run_id="20261123-100336-fsdp1-n4-r0-66dff1", label="fsdp1-hybrid", world_size=4, steps=[],
                    status="unsupported", reasons=["hybrid sharding needs at least two replicas " * 4]),
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    "words",
    [
        *([command, "--help"] for command in COMMANDS),
        ["labs", "run", "--help"], ["labs", "table", "--help"], ["slurm", "render", "--help"],
        ["backends"], ["settings"], ["explain", "gradient-scale"],
        ["list"], ["show"], ["show", "0201c6"], ["clean"],
        ["compare", "--dry-run", "--backends", "ddp,fsdp1-hybrid-grad-op,trainer-fsdp"],
        pytest.param(["compare", "--dry-run", "--backends", "all"], marks=EXHAUSTIVE),
        ["labs", "list"], ["labs", "table", "model-memory"], ["labs", "table", "fsdp-lecture"],
        ["estimate", *LLAMA, "--world-size", "8,64"], ["estimate", "--list", "models"],
        ["estimate", *LLAMA, "--world-size", "8", "--backends", "zero3,fsdp1", "--details"],
        ["estimate", "--list", "hardware"],
        pytest.param(["recommend", *LLAMA, "--gpus", "8", "--tokens-per-step", "4M"], marks=COSTLY),
        pytest.param(["recommend", *LLAMA, "--gpus", "64", "--tokens-per-step", "4M"], marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_line_fits(words: list[str], folder: Path) -> None:
    with patch.object(output, "_at_terminal", return_value=True):
        done = succeeds(*words, cwd=folder)
    lines = [line.split("\r")[-1] for line in (done.stdout + done.stderr).splitlines()]
    assert [line for line in lines if len(line) > WIDTH and not is_to_copy(line)] == []


def is_to_copy(line: str) -> bool:
    """A command, or a path that is longer than a line: neither is broken."""
    return line.startswith("  harness ") or len(line.split()) <= 2


def test_what_a_program_reads_is_not_folded(folder: Path) -> None:
    long = harness("backends", "--json", cwd=folder).stdout
    with patch.object(output, "_at_terminal", return_value=True):
        assert harness("backends", "--json", cwd=folder).stdout == long
    assert max(map(len, long.splitlines())) > WIDTH


def test_sentences_fold_below_their_beginning_and_tables_do_not() -> None:
    sentence = "- " + "word " * 40
    first, *others = folded(sentence).splitlines()
    assert first.startswith("- word")
    assert all(line.startswith("  word") for line in others)
    assert " ".join([first, *others]).split() == sentence.split()
    row = "name  " + "column " * 30
    assert folded(row) == row


def test_a_table_that_fits_is_left_alone() -> None:
    assert fitted([["ddp", "1"]], ["backend", "ranks"], alignments={"ranks": "right"}).splitlines() == [
        "backend  ranks", "-------  -----", "ddp          1",
    ]  # fmt: skip


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
