"""Elements of a job array end on their own."""

from pathlib import Path

import pytest

from harness.record.store import read_record
from tests.cluster.endless import SLOW_LINK, reason, trained_on
from tests.cluster.matrices import ENDLESS, render
from tests.cluster.slurm import SlurmCluster
from tests.events import steps_taken

pytestmark = [
    pytest.mark.usefixtures("quiet_cluster"), pytest.mark.long(seconds=40), pytest.mark.exhaustive,
]  # fmt: skip
CELLS = ("--backends", "ddp,fsdp", "--nodes", "2", "--nproc", "1", "--array")


def test_a_time_limit_of_one_element_ends_that_one_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The notice before the limit, which the script of the element asks for, reaches no other element."""
    matrix = render(cluster, tmp_path, *CELLS, steps=ENDLESS).without("single")
    cluster.nodes.shape(SLOW_LINK)
    matrix.harness("submit")
    for backend in ("ddp", "fsdp"):
        matrix.wait_for_steps(backend)
    ended, other = matrix.job("ddp"), matrix.job("fsdp")
    assert ended.partition("_")[0] == other.partition("_")[0]
    # Slurm counts limits in minutes, its ends of jobs in seconds. The notice comes 30 s before.
    cluster.command("scontrol", "update", f"JobId={ended}", "EndTime=now+35", cwd=tmp_path)
    cluster.wait_for_jobs([ended], tmp_path, 120)
    taken = steps_taken(matrix.directory("fsdp") / "rank-00000.jsonl")
    matrix.wait_for_steps("fsdp", taken + 4)
    cluster.harness("slurm", "cancel", "jobs", matrix.request("fsdp").run_id, cwd=tmp_path)
    matrix.wait_until_over()
    matrix.harness("collect")
    records = {b: read_record(matrix.directory(b) / "record.json") for b in ("ddp", "fsdp")}
    assert {b: reason(record) for b, record in records.items()} == {
        "ddp": ("timeout", "TimeLimit"), "fsdp": ("failed", "Cancelled"),
    }  # fmt: skip
    assert all(len(trained_on(record)) == 2 for record in records.values())
