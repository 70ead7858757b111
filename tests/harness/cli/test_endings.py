"""Runs and comparisons that end before their time leave no process and whole records."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.launch import watch
from harness.launch.owner import forget_never_begun, lines_about, record_abandoned
from harness.record import Record
from harness.record.store import Store, read_record
from harness.run_directory.rank_state import Owner
from tests.events import steps_taken
from tests.faults.scene import WITHOUT_OVERRIDE
from tests.forkserver import launcher
from tests.patience import SECONDS, until
from tests.representatives import first

from .command_line import HARNESS, LONG, SHORT, environment, harness, records, succeeds

pytestmark = pytest.mark.long(seconds=30)


@dataclass
class Running:
    process: subprocess.Popen[str]
    runs: Path
    children: list[psutil.Process] = field(default_factory=list)

    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    def steps(self) -> int:
        found = list(self.runs.glob("*/rank-00000.jsonl"))
        return steps_taken(found[0]) if found else 0

    def family(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self) -> tuple[Record, str]:
        _, stderr = self.process.communicate(timeout=SECONDS)
        return read_record(self.folder() / "record.json"), stderr


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `harness run` of a job that never ends by itself, and wait until it has taken steps."""
    started: list[Running] = []

    def begin(*arguments: str) -> Running:
        process = subprocess.Popen(
            [*HARNESS, "run", "--backend", "ddp", "--nproc", "2", *LONG, *arguments],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell that runs the tests in the background ignores the signal, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        running = Running(process, tmp_path / "runs")
        started.append(running)
        until(lambda: running.steps() >= 3 or process.poll() is not None)
        running.children = running.family()
        return running

    yield begin
    for running in started:
        # What survives its parent would hold the pipes open and the machine busy.
        for process in [*running.children, running.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        running.process.communicate()


def gone(family: list[psutil.Process]) -> bool:
    return until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))


def own_family() -> list[psutil.Process]:
    """What this process has started, its fork server among it."""
    launcher()
    return psutil.Process().children(recursive=True)


def pid_of_rank(runs: Path, family: list[psutil.Process], rank: int) -> int:
    """The process whose output goes to the rank's log."""
    (log,) = runs.glob(f"*/rank-{rank:05d}.log")
    places = {}
    for process in family:
        with contextlib.suppress(OSError):  # it has ended, and nobody has asked how
            places[os.readlink(f"/proc/{process.pid}/fd/1")] = process.pid
    return places[str(log)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.costly
def test_interrupts_stop_all_ranks_and_keep_what_was_done_however_many_come(
    start: Start, number: signal.Signals
) -> None:
    running = start()
    family = running.family()
    assert len(family) >= 3
    if number == signal.SIGUSR1:  # Slurm sends it to every process of a step
        for process in family:
            process.send_signal(number)
        time.sleep(0.5)
        assert all(process.status() != "zombie" for process in family)
    for _ in range(4):
        running.process.send_signal(number)
        time.sleep(0.1)
    record, stderr = running.finish()
    assert gone(family)
    assert (record.status, record.error.kind) == ("failed", "Interrupted")
    assert len(record.steps) >= 3
    assert all(step.loss is not None for step in record.steps)
    assert running.process.returncode != 0
    assert "Traceback" not in stderr


@pytest.mark.parametrize("seconds", first([0.8], [0.0, 0.8, 2.0]))
def test_interrupt_from_the_terminal_before_the_ranks_train_prints_no_traceback(
    tmp_path: Path, seconds: float
) -> None:
    process = subprocess.Popen(
        [*HARNESS, "run", "--backend", "ddp", "--nproc", "2", *LONG],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    running = Running(process, tmp_path / "runs")
    until(lambda: len(running.family()) >= 2)  # its tracker and its fork server
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode not in (0, None)
    assert "Traceback" not in stderr


def test_weights_that_are_not_finite_leave_a_record(tmp_path: Path) -> None:
    done = harness(
        "run", "--backend", "ddp", "--json", *SHORT, "--set", "optimizer.learning_rate=1e30", cwd=tmp_path
    )
    assert "Validation" not in done.stderr
    (record,) = records(tmp_path / "runs")
    assert record.status == "diverged"
    assert record.final_weights.sketch is None


@pytest.mark.skipif(sys.platform != "linux", reason="finds the rank through /proc")
@pytest.mark.parametrize("rank", first([1], [0, 1]))
def test_killed_rank_is_named(tmp_path: Path, rank: int) -> None:
    before = own_family()
    runs = tmp_path / "runs"

    def kill_once_it_trains() -> None:
        until(lambda: any(steps_taken(path) >= 3 for path in runs.glob("*/rank-00000.jsonl")))
        os.kill(pid_of_rank(runs, own_family(), rank), signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_trains)
    killer.start()
    limit = ("--set", f"runtime.timeout_seconds={SECONDS}")
    done = harness("run", "--backend", "ddp", "--nproc", "2", *LONG, *limit, cwd=tmp_path)
    killer.join()
    assert gone([child for child in own_family() if child not in before])
    (record,) = records(runs)
    assert record.status == "failed"
    assert record.error.rank == rank, record.error
    assert "SIGKILL" in record.error.message
    assert len(record.steps) >= 2
    assert done.stderr.splitlines()[-1].startswith("harness: run failed:")
    assert "Traceback" not in done.stderr


def test_timeout_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_family()

    def now() -> float:
        """A thousand seconds later once rank 0 has taken steps."""
        has_trained = any(map(steps_taken, tmp_path.glob("runs/*/rank-00000.jsonl")))
        return time.monotonic() + 1000 * has_trained

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    limit = ("--set", "runtime.timeout_seconds=900")
    done = harness("run", "--backend", "ddp", "--nproc", "2", *LONG, *limit, cwd=tmp_path)
    assert gone([child for child in own_family() if child not in before])
    (record,) = records(tmp_path / "runs")
    assert record.status == "timeout"
    assert "runtime.timeout_seconds" in record.error.message
    assert len(record.steps) >= 1
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("harness: run timeout:")


OWN = """
import os, torch
from torch import nn

def model(leave):
    if leave and os.environ.get("RANK") == "1":
        leave = getattr(os, leave, None) or exit
        leave(7)
    return nn.Linear(4, 1)

def samples():
    return [{"x": torch.ones(4), "target": torch.ones(1)}] * 8

def loss(megabytes):
    def compute(model, batch):
        if megabytes and os.environ.get("RANK") == "1":
            raise RuntimeError("x" * megabytes * 10**6)
        return (model(batch["x"]) - batch["target"]).square().mean()

    return compute
"""


@pytest.mark.parametrize(
    ("leave", "megabytes", "said"),
    [
        ("_exit", 0, "(rank 1, setup): model.factory 'own.py:model' ended the rank with exit code 7"),
        ("exit", 0, "model.factory 'own.py:model' called sys.exit(7); return what it makes instead (rank 1)"),
        ("", 50, "RuntimeError (rank 1, step 0, forward): xxx"),
    ],
)
def test_code_of_the_job_that_ends_one_rank_is_named(
    tmp_path: Path, leave: str, megabytes: int, said: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "job.yaml").write_text(
        f"task: custom\nmodel: {{factory: 'own:model', arguments: {{leave: '{leave}'}}}}\n"
        "data: {factory: 'own:samples'}\n"
        f"loss: {{factory: 'own:loss', arguments: {{megabytes: {megabytes}}}, reduction: mean, "
        "targets: samples}\n"
        "training: {steps: 2, global_batch_size: 4}\n"
    )
    done = harness("run", "--config", "job.yaml", "--backend", "ddp", "--nproc", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


ROOT = Path(__file__).resolve().parents[3]


def start_compare(
    folder: Path, kind: str, *arguments: str, limit: int | None = None
) -> subprocess.Popen[str]:
    """`limit`: no file becomes larger, as on a full disk."""

    def fill() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    program = [*WITHOUT_OVERRIDE, sys.executable] if os.geteuid() == 0 else [sys.executable]
    return subprocess.Popen(
        [*program, "-m", "tests.fake_compare", kind, "--runs", str(folder / "runs"), *arguments],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT), PYTHONFAULTHANDLER=""), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=fill,
    )  # fmt: skip


def compare(folder: Path, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start_compare(folder, kind, *arguments)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_cell_that_cannot_be_started_is_a_record_and_the_others_run(tmp_path: Path) -> None:
    done = compare(tmp_path, "unstartable", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "runs")
    failed = [record for record in found if record.backend.name == "ddp"]
    assert len(found) == 5
    assert [record.status for record in failed] == ["failed", "failed"]
    assert (failed[0].error.kind, failed[0].error.message[:28]) == (
        "RuntimeError",
        "no process can be started: \\",
    )
    assert {record.status for record in found if record not in failed} == {"ok"}
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["removed", "all_removed", "replaced", "moved", "piped"])
@pytest.mark.costly
def test_a_lost_folder_fails_its_cell_alone(tmp_path: Path, kind: str) -> None:
    done = compare(tmp_path, kind, "--repeats", "2")
    assert done.returncode == 0, done.stderr
    found, _ = Store(tmp_path / "runs").records()
    lost = [record for record in found if record.backend.name == "ddp"]
    is_read = kind in ("replaced", "moved")
    said = f"was removed, moved or replaced while its ranks ran{', after 4 steps' * is_read}"
    for record in lost:
        assert record.error.message.endswith(said)
        assert (record.status, record.error.kind) == ("failed", "FolderLost")
        assert len(record.steps) == 4 * is_read
    others = [record.status for record in found if record not in lost]
    assert (len(lost), others) == ((1, []) if kind == "all_removed" else (2, ["ok"] * 3))
    assert list(record_abandoned(tmp_path / "runs")) == []


def test_a_closed_folder_has_its_record_in_another_once(tmp_path: Path) -> None:
    done = compare(tmp_path, "closed")
    assert done.returncode == 0, done.stderr
    (closed,) = [path for path in tmp_path.glob("runs/*") if not (path / "record.json").exists()]
    assert (
        f"run '{closed}' cannot be written: Permission denied; its record is in {closed}"[:-6] in done.stderr
    )
    closed.chmod(0o755)
    assert list(record_abandoned(tmp_path / "runs")) == []


@pytest.mark.costly
def test_full_disk_names_the_run_and_keeps_older_records(tmp_path: Path) -> None:
    compare(tmp_path, "sound")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/record.json")}
    process = start_compare(tmp_path, "sound", "--fresh", limit=1000)
    err = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 1
    line = err.splitlines()[-1]
    assert line.startswith("harness: run '")
    assert line.endswith("cannot be written: File too large")
    assert {path: path.read_bytes() for path in before} == before
    assert not list((tmp_path / "runs").glob("*/.*"))


def test_signal_during_the_last_cell_is_no_success(tmp_path: Path) -> None:
    done = compare(tmp_path, "interrupted")
    assert done.returncode == 130
    (record,) = [record for record in records(tmp_path / "runs") if record.status == "failed"]
    assert record.error.kind == "Interrupted"


@pytest.mark.costly
def test_run_folder_that_was_renamed_counts_and_is_reported(tmp_path: Path) -> None:
    compare(tmp_path, "sound")
    (old,) = (tmp_path / "runs").glob("*-ddp-*")
    old.rename(old.with_name("best run"))
    done = compare(tmp_path, "sound", "--report", "report.md")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 cells have a record" in done.stderr
    assert "best run" in (tmp_path / "report.manifest.json").read_text()


def test_two_comparisons_at_once_run_no_cell_twice(tmp_path: Path) -> None:
    both = [start_compare(tmp_path, "slow", "--repeats", "2") for _ in range(2)]
    errors = [process.communicate(timeout=SECONDS)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    made = [record.cell for record in records(tmp_path / "runs")]
    assert len(made) == len(set(made)) == 5
    assert any("another comparison on this folder runs it" in text for text in errors)
    assert not list((tmp_path / "runs").glob(".*.lock"))


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A folder of runs whose comparison was killed in its last cell."""
    process = start_compare(tmp_path, "endless")

    def both_trained() -> bool:
        """One of both alone is no step of the run."""
        events = (tmp_path / "runs").glob("*-ddp-*/rank-0000?.jsonl")
        return sum(path.read_text().count('"step"') >= 4 for path in events) == 2

    until(both_trained)
    ranks = _children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    for rank in ranks:  # the fake ranks do not follow their launcher
        os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    return tmp_path


def test_run_whose_launcher_was_killed_is_named_and_recorded_by_the_next_command(abandoned: Path) -> None:
    (folder,) = (abandoned / "runs").glob("*-ddp-*")
    done = succeeds("report", abandoned / "runs", "-o", abandoned / "report.md", cwd=abandoned)
    assert f"run {folder.name} has no record: its launcher" in done.stderr
    assert not (folder / "record.json").exists()
    again = compare(abandoned, "sound")
    assert f"run {folder.name} was abandoned by its launcher and is recorded now: failed" in again.stderr
    record = read_record(folder / "record.json")
    assert record.error.kind == "LauncherLost"
    assert len(record.steps) >= 1
    assert len(records(abandoned / "runs")) == 4  # and the cell ran again


def test_run_that_was_killed_before_it_began_leaves_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    begun, empty, young, other = (
        runs / name
        for name in (
            "20260101-000000-ddp-n2-r0-000000", "20260101-000000-ddp-n2-r0-000001",
            "20260101-000000-ddp-n2-r0-000002", "notes",
        )
    )  # fmt: skip
    for folder in (begun, empty, young, other):
        folder.mkdir(parents=True)
    note = f'{{"host": "{socket.gethostname()}", "process": 1, "started": 1.0}}'
    (begun / "launcher.json").write_text(note)
    os.utime(empty, (0, 0))
    os.utime(other, (0, 0))
    forget_never_begun(runs)
    assert sorted(runs.iterdir()) == [young, other]


def test_run_of_another_launcher_that_was_killed_is_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "external").mkdir(parents=True)
    gone = f'{{"host": "{socket.gethostname()}", "process": 1, "started": 1.0}}'
    (runs / "external" / "rank-00000.owner.json").write_text(gone)
    (line,) = lines_about(runs)
    assert line.startswith("run external has no record: its ranks and their monitors (process 1) were killed")
    (runs / "external" / "rank-00001.owner.json").write_text(Owner.myself().model_dump_json())
    (line,) = lines_about(runs)
    assert line.startswith("run external has no record yet")


def _children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in path.read_text().split()]
