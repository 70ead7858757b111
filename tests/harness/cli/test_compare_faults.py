"""A comparison survives its cells, its user and itself: ranks here are small processes without torch."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.launch.owner import forget_never_begun, lines_about
from harness.record.store import read_record
from harness.run_directory.rank_state import Owner
from tests.patience import SECONDS

from .command_line import environment, harness, records

pytestmark = pytest.mark.long(seconds=20)
ROOT = Path(__file__).resolve().parents[3]


def start(folder: Path, kind: str, *arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    """`limit`: no file becomes larger, as on a full disk."""

    def fill() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_compare", kind, "--runs", str(folder / "runs"), *arguments],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT), PYTHONFAULTHANDLER=""), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=fill,
    )  # fmt: skip


def compare(folder: Path, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, kind, *arguments)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_cell_that_cannot_be_started_is_a_record_and_the_others_run(tmp_path: Path) -> None:
    done = compare(tmp_path, "unstartable", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "runs")
    failed = [record for record in found if record.backend.name == "ddp"]
    assert len(found) == 5
    assert [record.status for record in failed] == ["failed", "failed"]
    assert failed[0].error is not None
    assert (failed[0].error.kind, failed[0].error.message[:28]) == (
        "RuntimeError",
        "no process can be started: \\",
    )
    assert {record.status for record in found if record not in failed} == {"ok"}
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["removed", "all_removed", "replaced"])
@pytest.mark.costly
def test_a_lost_folder_fails_its_cell_alone(tmp_path: Path, kind: str) -> None:
    done = compare(tmp_path, kind, "--repeats", "2")
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "runs")
    lost = [record for record in found if record.backend.name == "ddp"]
    for record in lost:
        assert record.error is not None
        assert "was removed, moved or replaced while its ranks ran" in record.error.message
        assert (record.status, record.error.kind) == ("failed", "FolderLost")
    others = [record.status for record in found if record not in lost]
    assert (len(lost), others) == ((1, []) if kind == "all_removed" else (2, ["ok"] * 3))


@pytest.mark.costly
def test_full_disk_names_the_run_and_keeps_older_records(tmp_path: Path) -> None:
    compare(tmp_path, "sound")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/record.json")}
    process = start(tmp_path, "sound", "--fresh", limit=1000)
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
    assert record.error is not None
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
    both = [start(tmp_path, "slow", "--repeats", "2") for _ in range(2)]
    errors = [process.communicate(timeout=SECONDS)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    made = [record.cell for record in records(tmp_path / "runs")]
    assert len(made) == len(set(made)) == 5
    assert any("another comparison on this folder runs it" in text for text in errors)
    assert not list((tmp_path / "runs").glob(".*.lock"))


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A folder of runs whose comparison was killed in its last cell."""
    process = start(tmp_path, "endless")
    deadline = time.monotonic() + SECONDS
    done: list[int] = []
    while len(done) < 2 or min(done) < 4:  # steps of both ranks: one of both alone is no step of the run
        assert time.monotonic() < deadline
        time.sleep(0.05)
        events = (tmp_path / "runs").glob("*-ddp-*/rank-0000?.jsonl")
        done = [path.read_text().count('"step"') for path in events]
    ranks = _children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    for rank in ranks:  # the fake ranks do not follow their launcher
        os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    return tmp_path


def test_run_whose_launcher_was_killed_is_named_and_recorded_by_the_next_command(abandoned: Path) -> None:
    (folder,) = (abandoned / "runs").glob("*-ddp-*")
    done = harness("report", abandoned / "runs", "-o", abandoned / "report.md", cwd=abandoned)
    assert done.returncode == 0
    assert f"run {folder.name} has no record: its launcher" in done.stderr
    assert not (folder / "record.json").exists()
    again = compare(abandoned, "sound")
    assert f"run {folder.name} was abandoned by its launcher and is recorded now: failed" in again.stderr
    record = read_record(folder / "record.json")
    assert record.error is not None
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
