"""Runs that are killed in every way that a cluster knows end in the right record, and the others finish."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.endless import collected, collected_anyhow, nodes_of, reason, started
from tests.cluster.slurm import SlurmCluster

pytestmark = pytest.mark.usefixtures("quiet_cluster")


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
    # Slurm counts limits in minutes; 35 seconds of notice leave 25 to start and train.
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
    names = nodes_of(matrix)
    cluster.nodes.power_off(names[1])
    try:
        record = collected(matrix)
    finally:
        cluster.power_on(names[1])
    assert reason(record) == ("failed", "NodeFailure")
    assert record.error is not None
    assert names[1] in record.error.message


def test_preempted(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = started(cluster, tmp_path)
    matrix.wait_for_steps("ddp")
    cluster.preempt(tmp_path)
    record = collected(matrix)
    assert reason(record) == ("failed", "Preempted")
    assert record.comm


def test_out_of_memory(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm watches what the job holds (jobacct_gather, OverMemoryKill); there are no cgroups here."""
    record = collected_anyhow(started(cluster, tmp_path, site="memory_per_node: 300M\n"))
    assert reason(record) == ("oom", "OutOfMemory")
