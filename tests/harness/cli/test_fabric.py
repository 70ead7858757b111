"""`harness fabric` on two real ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.fabric.result import OPERATIONS, read_fabric
from harness.gpus.found import Gpus
from tests.patience import SECONDS


@pytest.mark.costly
def test_two_ranks_measure_every_operation_and_a_gate_closes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "harness", "fabric", "--nproc", "2", "--device", "cpu", "--max-size",
            "64KB", "--repeats", "3", "--output", "fabric.json", "--require-busbw", "1TB/s",
            "--json",
        ],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "below the required 1e+03 GB/s" in done.stderr
    document = json.loads(done.stdout)
    result = read_fabric(tmp_path / "fabric.json")
    assert (result.transport, result.world_size) == ("gloo", 2)
    assert {row["op"] for row in document["rows"]} == set(OPERATIONS)
    for op in OPERATIONS:
        assert [row.size_bytes for row in result.rows if row.op == op] == [1024, 4096, 16384, 65536]
    assert all(second > 0 for row in result.rows for second in row.seconds)
    assert document["summary"]["all_reduce_bus_bytes_per_second"] == result.bus_bandwidth()


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--plot", "x.pdf", "ends with .svg or .png"),
        ("--plot", "nowhere/x.svg", "No such file or directory"),
        ("--output", "nowhere/x", "No such file or directory"),
        ("--plot", "folder.svg", "Is a directory"),
    ],
)
def test_files_that_cannot_be_written_are_told_before_measuring(
    option: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr("harness.cli.fabric.start_ranks", lambda nproc, arguments: pytest.fail("began"))
    done = CliRunner().invoke(harness, ["fabric", "--device", "cpu", option, str(tmp_path / name)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"harness: {option} was given '{tmp_path / name}'")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_device_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.gpus.found.find_gpus", lambda: Gpus(why_none="this machine shows no GPU"))
    done = CliRunner().invoke(harness, ["fabric", "--device", "cuda"])
    assert (done.exit_code, done.stderr.splitlines()) == (
        1,
        ["harness: no GPU can be used: this machine shows no GPU; --device cpu runs on the CPU"],
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a killed parent")
@pytest.mark.parametrize(
    ("number", "ended"),
    [pytest.param(signal.SIGTERM, 130, marks=pytest.mark.exhaustive), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_self_test_that_is_ended_leaves_no_rank_behind(number: signal.Signals, ended: int) -> None:
    command = [
        sys.executable, "-m", "harness", "fabric", "--nproc", "2", "--device", "cpu", "--max-size", "1KB",
        "--repeats", "100000000", "--seconds-per-row", "600",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + SECONDS
        ranks: list[psutil.Process] = []
        while len(ranks) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            family = psutil.Process(process.pid).children(recursive=True)
            ranks = [
                child for child in family if "--output" in child.cmdline() and child.ppid() != process.pid
            ]
        process.send_signal(number)
        code = process.wait(SECONDS)
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    for rank in alive:
        rank.kill()
    assert (code, len(ranks), alive) == (ended, 2, [])
