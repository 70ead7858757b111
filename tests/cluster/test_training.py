"""Matrices that train on several nodes, by every launcher: records, equal losses, scaling."""

import json
from pathlib import Path

import pytest

from harness.record import Record
from harness.record.store import read_record
from tests.cluster.matrices import RenderedMatrix, render
from tests.cluster.slurm import SlurmCluster

pytestmark = pytest.mark.long(seconds=300)

BACKENDS = "ddp,zero1,zero2,zero3,fsdp,fsdp-hybrid"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
"""All that a site file can name."""
LAUNCHED = ("ddp", "zero2")


@pytest.fixture(scope="module")
def matrix(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> RenderedMatrix:
    """Six strategies on 2 nodes x 2 ranks, as one job array."""
    folder = tmp_path_factory.mktemp("matrix")
    matrix = render(
        cluster, folder, "--backends", BACKENDS, "--nodes", "2", "--nproc", "2", "--array",
        site="launcher: torchrun\n",
    )  # fmt: skip
    matrix.harness("submit", "--wait", "--poll-seconds", "1")
    return matrix


@pytest.fixture(scope="module")
def by_backend(matrix: RenderedMatrix) -> dict[str, Record]:
    return {record.backend.label: record for record in matrix.records()}


@pytest.fixture(scope="module")
def by_launcher(
    cluster: SlurmCluster, by_backend: dict[str, Record], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Record]]:
    """Two backends on 2 nodes x 2 ranks; the first launcher's are among the matrix of all strategies."""
    found = {LAUNCHERS[0]: {backend: by_backend[backend] for backend in LAUNCHED}}
    for launcher in LAUNCHERS[1:]:
        folder = tmp_path_factory.mktemp(launcher)
        cells = ("--backends", ",".join(LAUNCHED), "--nodes", "2", "--nproc", "2")
        matrix = render(cluster, folder, *cells, site=f"launcher: {launcher}\n").without("single")
        matrix.harness("submit", "--wait", "--poll-seconds", "1")
        found[launcher] = {record.backend.label: record for record in matrix.records()}
    return found


def test_every_cell_has_a_record(by_backend: dict[str, Record]) -> None:
    assert {label: record.status for label, record in by_backend.items()} == dict.fromkeys(
        ["single", *BACKENDS.split(",")], "ok"
    )


def test_records_say_where_their_ranks_ran(by_backend: dict[str, Record]) -> None:
    record = by_backend["fsdp"]
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
    cluster: SlurmCluster, matrix: RenderedMatrix, by_backend: dict[str, Record], tmp_path: Path
) -> None:
    cluster.harness(
        "compare", "--config", matrix.folder / "job.yaml", "--backends", BACKENDS, "--nproc", "4",
        "--set", "runtime.threads_per_rank=1", cwd=tmp_path,
    )  # fmt: skip
    alone = {r.backend.label: r for r in map(read_record, (tmp_path / "runs").glob("*/record.json"))}
    for backend in BACKENDS.split(","):
        assert alone[backend].world.nodes == 1
        assert [s.loss for s in alone[backend].steps] == [s.loss for s in by_backend[backend].steps]
        assert alone[backend].final_weights == by_backend[backend].final_weights


def test_the_report_compares_them_with_the_reference(cluster: SlurmCluster, matrix: RenderedMatrix) -> None:
    document = json.loads(
        cluster.harness(
            "slurm", "collect", "jobs", "--report", "report.md", "--json", cwd=matrix.folder
        ).stdout
    )
    assert {row["phase"] for row in document["runs"]} == {"recorded"}
    report = (matrix.folder / "report.details.md").read_text()
    for backend in BACKENDS.split(","):
        (line,) = (
            line for line in report.splitlines() if line.startswith(f"| {backend} ") and " ok " in line
        )
        assert "tight" in line or "exact" in line


def test_rendering_again_finds_nothing_missing(cluster: SlurmCluster, matrix: RenderedMatrix) -> None:
    done = cluster.harness(
        "slurm", "render", "--site", "site.yaml", "--config", "job.yaml", "--backends", BACKENDS, "--nodes",
        "2", "--nproc", "2", "-o", "again", cwd=matrix.folder,
    )  # fmt: skip
    assert "7 of 7 cells have a record" in done.stderr
    assert not (matrix.folder / "again").exists()


def test_scaling_over_one_two_and_four_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    matrix = render(cluster, tmp_path, "--backends", "ddp", "--nodes", "1,2,4", "--nproc", "1")
    matrix.harness("submit", "--wait", "--poll-seconds", "1")
    cluster.harness("slurm", "collect", "jobs", "--report", "report.md", cwd=tmp_path)
    records = matrix.records()
    assert {record.status for record in records} == {"ok"}
    assert sorted(r.world.nodes for r in records if r.backend.label == "ddp") == [1, 2, 4]
    reference = next(record for record in records if record.backend.label == "single")
    for record in records:
        assert [step.sample_hashes for step in record.steps] == [
            step.sample_hashes for step in reference.steps
        ]
        for step, expected in zip(record.steps, reference.steps, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-5)
    report = (tmp_path / "report.details.md").read_text()
    assert "## Scaling" in report
    scaling = report.split("## Scaling")[1].split("\n## ")[0]
    shown = [line.split("|")[2].strip() for line in scaling.splitlines() if line.startswith("| ddp ")]
    assert shown[:3] == ["1", "2", "4"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_two_ranks_on_each_node(
    by_launcher: dict[str, dict[str, Record]], launcher: str
) -> None:
    records = by_launcher[launcher]
    assert {label: record.status for label, record in records.items()} == {"ddp": "ok", "zero2": "ok"}
    for record in records.values():
        assert (record.world.nodes, record.world.ranks_per_node) == (2, 2)
        hosts = [rank.host for rank in record.ranks]
        assert hosts == sorted(hosts)
        assert len(set(hosts)) == 2


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_the_launcher_changes_no_loss(by_launcher: dict[str, dict[str, Record]], backend: str) -> None:
    losses = {tuple(step.loss for step in records[backend].steps) for records in by_launcher.values()}
    assert len(losses) == 1
    assert len(losses.pop()) == 8
