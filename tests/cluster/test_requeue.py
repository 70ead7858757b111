"""Jobs that Slurm starts again: what is done stays, what was cut short starts clean, and records say so."""

import sys
from pathlib import Path

import pytest

from harness.record.store import read_record
from tests.cluster.matrices import SMALL, collected, nodes_of, started
from tests.cluster.nodes import wait_for
from tests.cluster.slurm import SlurmCluster
from tests.representatives import EXHAUSTIVE

pytestmark = [pytest.mark.usefixtures("quiet_cluster"), pytest.mark.long(seconds=100)]
COMPARE = """\
#!/bin/bash
exec {python} -m harness compare --config job.yaml --backends ddp --nproc 2 --fresh --report report.md
"""


@EXHAUSTIVE
def test_requeued_after_a_node_failed(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The run starts clean on the nodes that are left, and the record says so."""
    matrix = started(cluster, tmp_path, requeue=True)
    directory = matrix.wait_for_steps("ddp")
    names = nodes_of(matrix, "ddp")
    cluster.nodes.power_off(names[1])
    try:
        wait_for(lambda: (directory / "attempt-0").exists(), "the second attempt", 90)
        matrix.wait_for_steps("ddp")
        cluster.harness("slurm", "cancel", "jobs", cwd=tmp_path)
        record = collected(matrix)
    finally:
        cluster.power_on_all()
    slurm = record.environment.slurm
    assert (slurm.attempts, slurm.restarts) == (2, 1)
    assert names[1] not in {rank.host for rank in record.ranks}
    assert record.steps[0].step == 0


def test_requeued_after_a_preemption(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The run waits until the more urgent job is over, and starts clean."""
    matrix = started(cluster, tmp_path, requeue=True)
    directory = matrix.wait_for_steps("ddp")
    cluster.preempt(tmp_path)
    wait_for(lambda: (directory / "attempt-0").exists(), "the second attempt", 90)
    matrix.wait_for_steps("ddp")
    cluster.harness("slurm", "cancel", "jobs", cwd=tmp_path)
    record = collected(matrix)
    slurm = record.environment.slurm
    assert (slurm.attempts, slurm.restarts) == (2, 1)
    assert record.steps[0].step == 0


@EXHAUSTIVE
def test_a_requeued_comparison_goes_on_with_the_remaining_cells(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Also with --fresh: what an earlier attempt of the same job finished is as fresh as the job."""
    (tmp_path / "job.yaml").write_text(SMALL.format(steps=8))
    (tmp_path / "compare.sbatch").write_text(COMPARE.format(python=sys.executable))
    job = cluster.command(
        "sbatch", "--parsable", "--requeue", "--cpus-per-task=2", "--output=job.log", "--open-mode=append",
        "compare.sbatch", cwd=tmp_path,
    ).stdout.strip()  # fmt: skip

    def records() -> list[Path]:
        return sorted((tmp_path / "runs").glob("*/record.json"))

    wait_for(records, "the record of the reference", 60)
    (reference,) = records()
    cluster.command("scontrol", "requeue", job, cwd=tmp_path)
    cluster.wait_for_jobs([job], tmp_path)
    found = {path: read_record(path) for path in records()}
    assert [(r.backend.label, r.status) for r in found.values() if r.status == "ok"] == [
        ("single", "ok"), ("ddp", "ok")
    ]  # fmt: skip
    assert reference in found
    assert f"job {job} was started again: 1 of 2 cells have a record" in (tmp_path / "job.log").read_text()
