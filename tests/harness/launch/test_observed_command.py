"""One row of a comparison of scripts: however its script misbehaves, it ends, and leaves nothing behind."""

import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from harness.job.experiment import Limits, MeasureSection
from harness.launch import observed_command
from harness.launch.bootstrap.sitecustomize import RUN_DIRECTORY
from harness.launch.observed_command import RowLaunch, observe_command, observe_row
from harness.record import ErrorPart
from harness.record.store import Store
from harness.run_directory.observed_record import ScriptRow
from tests.fake_ranks import has_ended
from tests.patience import until

FLOODS = "while True: print('x' * 100_000)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
FORKS = """
import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open("left", "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists("left") or not open("left").read():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("script", "status", "why"),
    [
        (FLOODS, "timeout", "runtime.timeout_seconds=3"),
        (DEAF, "timeout", "runtime.timeout_seconds=3"),
        (
            "print(('x' * 10**6 + chr(10)) * 100); exit(3)",
            "failed",
            "trained: exit code 3; last printed: xxx",
        ),
        (FORKS, "failed", "no process of the script trained: exit code 0"),
        ("raise SystemExit('no such data')", "failed", "trained: exit code 1; last printed: no such data"),
        ("raise SystemExit('Error: No such option: -x')", "failed", "trained: Error: No such option: -x"),
    ],
    ids=["floods", "deaf", "prints 100 MB", "forks", "exits", "takes no such option"],
)
def test_a_script_that_misbehaves_ends_and_leaves_nothing(
    script: str, status: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observed_command, "MOST_OUTPUT_BYTES", 2**16)
    monkeypatch.setattr(observed_command, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(observed_command, "INTERRUPT_SECONDS", 0.2)
    seconds = 3.0 if status == "timeout" else 60.0
    tracemalloc.start()
    record = observe_row(
        ScriptRow(label="a", key="a"),
        RowLaunch(script=[sys.executable, "-c", script], world_size=1, device="cpu"),
        Store(tmp_path / "runs"), MeasureSection(), Limits(timeout_seconds=seconds), [],
    )  # fmt: skip
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()
    assert (record.status, record.backend.label) == (status, "a")
    assert isinstance(record.error, ErrorPart)
    assert why in record.error.message
    (log,) = (tmp_path / "runs").glob("*/launcher.log")
    if script == FLOODS:
        size = log.stat().st_size
        time.sleep(0.2)
        assert log.stat().st_size == size
        assert observed_command.EMPTIED in log.read_bytes()
    if script == FORKS:
        assert not psutil.pid_exists(int(Path("left").read_text()))


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("import helper, torch, os", ["helper.py"]),
        ("import wandb", []),  # a folder of that name holds logs: the installed one is imported
        ("from utils.data import split", ["utils/data.py"]),
        ("import utils.data as data", ["utils/data.py"]),
        ("from own import model", ["own/__init__.py", "own/model.py", "own/layers.py"]),
        ("from own.model import *", ["own/__init__.py", "own/model.py", "own/layers.py"]),
        ("def later():\n    import helper", ["helper.py"]),
        ("import helper\0", []),
        ("import", []),
        ("import large, folder, helper", ["helper.py"]),
        ("import helper\nx = " + "-" * 100_000 + "1", []),  # too deep for the parser
        ("import helper\n'\\d'", ["helper.py"]),  # of which Python warns
        ("import own.model, helper", ["own/__init__.py", "own/model.py", "helper.py"]),  # the most
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_script_s_files_are_those_beside_it_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, files: list[str]
) -> None:
    monkeypatch.setattr(observed_command, "MOST_FILES", 4)
    monkeypatch.setattr(observed_command, "MOST_DOCUMENT_BYTES", 150_000)
    content = {
        "helper.py": "import train", "unused.py": "", "wandb/log.txt": "", "utils/data.py": "",
        "own/__init__.py": "", "own/model.py": "from . import layers", "own/layers.py": "",
        "large.py": " " * 200_000, "folder.py/x": "",
    }  # fmt: skip
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(script)
    found = observed_command.files_of(["torchrun", str(tmp_path / "train.py"), "--lr", "1"])
    assert list(found) == [str(tmp_path / name) for name in ("train.py", *files)]


@pytest.mark.parametrize(
    ("deed", "why"),
    [("shutil.rmtree(run)", "was removed, moved or replaced while it ran"),
     ("(run / 'rank-00000.jsonl').write_text('{\"kind\"')", "rank-00000.jsonl could not be written: a full"),
     ("(run / 'rank-00000.jsonl').write_text('{}\\n')", "")],
    ids=["removed", "cut short", "complete"],
)  # fmt: skip
def test_what_keeps_a_script_from_being_recorded_is_said(tmp_path: Path, deed: str, why: str) -> None:
    run = f"import os, pathlib, shutil; run = pathlib.Path(os.environ['{RUN_DIRECTORY}']); {deed}"
    command, store = [sys.executable, "-S", "-c", run], Store(tmp_path)
    done = observe_command(command, store, MeasureSection(), command=[], keeps_output_free=False)
    assert (done.record, done.exit_code, why in done.problem) == (None, 0, True)
    assert bool(done.problem) is bool(why)


def test_a_script_ends_with_a_killed_observer(tmp_path: Path) -> None:
    script = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    command = [sys.executable, "-m", "harness", "observe", "--", *script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as observer:
        assert observer.stdout is not None
        script_id = int(observer.stdout.readline())
        observer.kill()
    until(lambda: has_ended(script_id))


ASKED = """
import os, pathlib, signal, threading, time
pathlib.Path("answered").unlink(missing_ok=True)
if {answers}:
    signal.signal({number}, lambda *_: pathlib.Path("answered").touch())
threading.Timer(0.2, os.kill, (os.getppid(), {number})).start()
until = time.monotonic() + 60
while not os.path.exists("answered") and time.monotonic() < until:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("answers", [True, False])
def test_what_a_job_script_signals_reaches_the_command_and_its_end_is_said(
    number: int, answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = [sys.executable, "-S", "-c", ASKED.format(answers=answers, number=int(number))]
    store = Store(tmp_path / "runs")
    done = observe_command(script, store, MeasureSection(), command=[], keeps_output_free=False)
    assert Path("answered").exists() is answers
    said = f"signal {int(number)} ({signal.strsignal(number)}) ended the command before it trained"
    assert (done.exit_code, done.problem) == ((0, "") if answers else (128 + number, said))
    assert not list((tmp_path / "runs").iterdir())
