"""Jobs that wait, and what sbatch reads in a script: nothing is started."""

from collections.abc import Iterator

import pytest

from tests.cluster.matrices import RenderedMatrix, render
from tests.cluster.slurm import SlurmCluster

HELD = """\
max_queued_jobs: 3
options: {hold: true}
environment: {NOTE: "a\\n#PBS -N another\\n#BSUB -J another"}
"""
CELLS = ("--backends", "ddp,fsdp,fsdp1", "--nodes", "2", "--nproc", "1", "--array")


@pytest.fixture(scope="module")
def held(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderedMatrix]:
    """Three runs of four submitted: a job, and two elements of an array."""
    matrix = render(cluster, tmp_path_factory.mktemp("held"), *CELLS, site=HELD)
    matrix.harness("submit")
    yield matrix
    cluster.command("scancel", "--user=root", cwd=matrix.folder)


def test_each_waiting_element_of_an_array_counts_against_the_limit(held: RenderedMatrix) -> None:
    phases = [run["phase"] for run in held.harness("submit")["runs"]]
    assert phases == ["pending", "pending", "pending", "not submitted"]


def test_waiting_runs_get_no_record(held: RenderedMatrix) -> None:
    assert {run["state"] for run in held.harness("collect")["runs"]} == {"PENDING", None}
    assert held.records() == []


def test_sbatch_takes_no_options_out_of_a_value(held: RenderedMatrix) -> None:
    names = held.cluster.command("squeue", "--noheader", "--Format=Name:|", cwd=held.folder).stdout.split()
    assert sorted(names) == ["harness-1x1|", "harness-2x1|"]
