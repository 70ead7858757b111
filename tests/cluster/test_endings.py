"""Runs that are killed in every way that a cluster knows end in the right record, and the others finish."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.record import Record
from tests.cluster.matrices import ENDLESS, RenderedMatrix, render
from tests.cluster.nodes import wait_for
from tests.cluster.slurm import SlurmCluster

TWO_NODES = ("--backends", "ddp", "--nodes", "2", "--nproc", "1")


@pytest.fixture(autouse=True)
def quiet_cluster(cluster: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    """Leave no job behind for the next test."""
    yield
    cluster.command("scancel", "--user=root", cwd=tmp_path)


def started(cluster: SlurmCluster, folder: Path, **site: object) -> RenderedMatrix:
    matrix = render(cluster, folder, *TWO_NODES, steps=ENDLESS, **site)  # type: ignore[arg-type]
    # The reference would never end either: only the run on two nodes is submitted.
    (reference,) = (row["run_id"] for row in matrix.runs() if row["backend"] == "single")
    path = folder / "jobs" / "matrix.json"
    document = json.loads(path.read_text())
    document["runs"] = [run for run in document["runs"] if run["request"]["run_id"] != reference]
    path.write_text(json.dumps(document))
    matrix.harness("submit")
    return matrix


def collected(matrix: RenderedMatrix) -> Record:
    matrix.wait_until_over()
    matrix.harness("collect")
    (record,) = matrix.records()
    assert record.steps
    assert all(step.loss is not None for step in record.steps)
    assert len({rank.host for rank in record.ranks}) == 2
    return record


def reason(record: Record) -> tuple[str, str]:
    assert record.error is not None
    return record.status, record.error.kind


def rank_process(directory: Path, rank: int) -> psutil.Process:
    """The process that trains as this rank: the child of its monitor."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "harness.worker" in words and str(directory) in words and "torch.distributed.run" not in words:
            monitored = process.children()
            if monitored and process.environ().get("RANK") == str(rank):
                return monitored[0]
    raise AssertionError(f"no process of rank {rank} in {directory}")


def test_time_limit(cluster: SlurmCluster, tmp_path: Path) -> None:
    # Slurm counts limits in minutes; 45 seconds of notice leave 15 to train.
    matrix = started(cluster, tmp_path, time_limit="1", notice_seconds=35)
    matrix.wait_for_steps("ddp")
    record = collected(matrix)
    assert reason(record) == ("timeout", "TimeLimit")
    assert record.comm, "what the counted steps measured is in the record"
    assert any(rank.memory for rank in record.ranks)


def test_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = started(cluster, tmp_path)
    matrix.wait_for_steps("ddp")
    cluster.harness("slurm", "cancel", "jobs", cwd=tmp_path)
    record = collected(matrix)
    assert reason(record) == ("failed", "Cancelled")
    assert record.comm
    assert record.environment["slurm"]["state"] == "CANCELLED"


def test_one_rank_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = started(cluster, tmp_path)
    directory = matrix.wait_for_steps("ddp")
    rank_process(directory, 1).send_signal(signal.SIGKILL)
    record = collected(matrix)
    assert reason(record) == ("failed", "Exit")
    assert record.error is not None
    assert record.error.rank == 1
    assert "SIGKILL" in record.error.message


def test_job_script_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = started(cluster, tmp_path)
    directory = matrix.wait_for_steps("ddp")
    shells = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("slurm_script" in word for word in process.info["cmdline"] or [])
    ]
    assert len(shells) == 1
    os.kill(shells[0].pid, signal.SIGKILL)
    record = collected(matrix)
    assert reason(record) == ("failed", "ScriptLost")
    assert not (directory / "slurm-end.json").exists()


def test_node_powered_off(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = started(cluster, tmp_path)
    matrix.wait_for_steps("ddp")
    (row,) = matrix.runs()
    listed = cluster.command("squeue", "-h", "-j", row["job"], "-o", "%N", cwd=tmp_path).stdout.strip()
    names = cluster.command("scontrol", "show", "hostnames", listed, cwd=tmp_path).stdout.split()
    cluster.nodes.power_off(names[1])
    try:
        record = collected(matrix)
    finally:
        cluster.power_on(names[1])
    assert reason(record) == ("failed", "NodeFailure")
    assert record.error is not None
    assert names[1] in record.error.message


def test_requeued_after_a_node_failed(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The run starts clean on the nodes that are left, and the record says so."""
    matrix = started(cluster, tmp_path, requeue=True)
    directory = matrix.wait_for_steps("ddp")
    (row,) = matrix.runs()
    listed = cluster.command("squeue", "-h", "-j", row["job"], "-o", "%N", cwd=tmp_path).stdout.strip()
    names = cluster.command("scontrol", "show", "hostnames", listed, cwd=tmp_path).stdout.split()
    cluster.nodes.power_off(names[1])
    try:
        wait_for(lambda: (directory / "attempt-0").exists(), "the second attempt", 90)
        matrix.wait_for_steps("ddp")
        cluster.harness("slurm", "cancel", "jobs", cwd=tmp_path)
        record = collected(matrix)
    finally:
        cluster.power_on(names[1])
    slurm = record.environment["slurm"]
    assert (slurm["attempts"], slurm["restarts"]) == (2, 1)
    assert names[1] not in {rank.host for rank in record.ranks}
    assert record.steps[0].step == 0
