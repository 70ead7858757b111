"""Matrices that train on several nodes: records, equal losses, scaling (launchers: test_launchers.py)."""

import json
from pathlib import Path

import pytest

from harness.record import Record
from harness.record.store import read_record
from tests.cluster.matrices import RenderedMatrix, render
from tests.cluster.slurm import SlurmCluster
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=300)

FEW, OTHERS = "zero3", "ddp,zero1,zero2,fsdp,fsdp-hybrid"
"""DDP, FSDP and FSDP-hybrid are on two nodes in test_endings.py, test_network.py and test_launchers.py."""


@pytest.fixture(scope="module", params=first([FEW], [FEW, OTHERS]))
def backends(request: pytest.FixtureRequest) -> str:
    """Strategies of one matrix."""
    return str(request.param)


@pytest.fixture(scope="module")
def matrix(cluster: SlurmCluster, backends: str, tmp_path_factory: pytest.TempPathFactory) -> RenderedMatrix:
    """The strategies on 2 nodes x 2 ranks, as one job array."""
    folder = tmp_path_factory.mktemp("matrix")
    matrix = render(
        cluster, folder, "--backends", backends, "--nodes", "2", "--nproc", "2", "--array",
        site="launcher: torchrun\n",
    )  # fmt: skip
    matrix.harness("submit", "--wait")
    return matrix


@pytest.fixture(scope="module")
def by_backend(matrix: RenderedMatrix) -> dict[str, Record]:
    return {record.backend.label: record for record in matrix.records()}


def test_every_cell_has_a_record(backends: str, by_backend: dict[str, Record]) -> None:
    assert {label: record.status for label, record in by_backend.items()} == dict.fromkeys(
        ["single", *backends.split(",")], "ok"
    )


def test_records_say_where_their_ranks_ran(backends: str, by_backend: dict[str, Record]) -> None:
    record = by_backend[backends.split(",")[-1]]
    assert (record.world.nodes, record.world.ranks_per_node) == (2, 2)
    hosts = [rank.host for rank in record.ranks]
    assert len(set(hosts)) == 2
    assert hosts[0] == hosts[1]
    assert [node.host for node in record.environment.nodes] == [hosts[0], hosts[2]]
    interfaces = {i.name for node in record.environment.nodes for i in node.interfaces}
    assert interfaces == {"eth0", "hsn0"}
    slurm = record.environment.slurm
    assert (slurm.state, slurm.exit_code) == ("COMPLETED", 0)
    assert (slurm.nodes or "").split(",") == sorted(set(hosts))
    assert slurm.elapsed_seconds > 0


def test_losses_equal_those_of_one_node(
    cluster: SlurmCluster,
    matrix: RenderedMatrix,
    backends: str,
    by_backend: dict[str, Record],
    tmp_path: Path,
) -> None:
    cluster.harness(
        "compare", "--config", matrix.folder / "job.yaml", "--backends", backends, "--nproc", "4",
        "--set", "runtime.threads_per_rank=1", cwd=tmp_path,
    )  # fmt: skip
    alone = {r.backend.label: r for r in map(read_record, (tmp_path / "runs").glob("*/record.json"))}
    for backend in backends.split(","):
        assert alone[backend].world.nodes == 1
        assert [s.loss for s in alone[backend].steps] == [s.loss for s in by_backend[backend].steps]
        assert alone[backend].final_weights == by_backend[backend].final_weights


def test_the_report_compares_them_with_the_reference(
    cluster: SlurmCluster, matrix: RenderedMatrix, backends: str
) -> None:
    document = json.loads(cluster.harness("slurm", "collect", "jobs", "--json", cwd=matrix.folder).stdout)
    cluster.harness("report", "runs", "-o", "report.md", cwd=matrix.folder)
    assert {row["phase"] for row in document["runs"]} == {"recorded"}
    report = (matrix.folder / "report.details.md").read_text()
    for backend in backends.split(","):
        (line,) = (
            line for line in report.splitlines() if line.startswith(f"| {backend} ") and " ok " in line
        )
        assert "tight" in line or "exact" in line


def test_rendering_again_finds_nothing_missing(
    cluster: SlurmCluster, matrix: RenderedMatrix, backends: str
) -> None:
    done = cluster.harness(
        "slurm", "render", "--site", "site.yaml", "--config", "job.yaml", "--backends", backends, "--nodes",
        "2", "--nproc", "2", "-o", "again", cwd=matrix.folder,
    )  # fmt: skip
    cells = 1 + len(backends.split(","))
    assert f"{cells} of {cells} cells have a record" in done.stderr
    assert not (matrix.folder / "again").exists()
