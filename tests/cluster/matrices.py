"""Small matrices and runs for the tests on a cluster, which end by themselves or are ended."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness.fabric.result import FabricResult, read_fabric
from harness.record import Record
from harness.record.store import read_record
from harness.run_directory.request import RunRequest
from harness.slurm.matrix import MATRIX_NAME, read_matrix
from harness.slurm.submission import read_jobs
from tests.cluster.nodes import wait_for
from tests.cluster.slurm import SlurmCluster
from tests.events import steps_taken

SITE = """\
name: tests
python: {python}
interface: hsn0
time_limit: "{time_limit}"
notice_seconds: {notice_seconds}
requeue: {requeue}
"""
SMALL = """\
model:
  config: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
            num_key_value_heads: 2}}
data: {{sequence_length: 32}}
training: {{steps: {steps}}}
measure: {{warmup_steps: 1, probed_steps: 2, traced_steps: 0}}
compare: {{noise_runs: false}}
"""
ENDLESS = 1_000_000


@dataclass(frozen=True)
class RenderedMatrix:
    """A folder that `harness slurm render` wrote, and the cluster that it goes to."""

    cluster: SlurmCluster
    folder: Path
    jobs: str = "jobs"
    """Within the folder: scripts and what was planned."""

    def harness(self, *words: str, timeout: float = 300.0) -> Any:
        """Run a `harness slurm` command on the matrix; its JSON document."""
        done = self.cluster.harness(
            "slurm", words[0], self.jobs, *words[1:], "--json", cwd=self.folder, timeout=timeout
        )
        return json.loads(done.stdout)

    def rendered_again(self, *words: str) -> Self:
        """What the same site and job still lack, rendered beside the first matrix."""
        self.cluster.harness(
            "slurm", "render", "--site", "site.yaml", "--config", "job.yaml", "-o", "again", *words,
            cwd=self.folder,
        )  # fmt: skip
        return type(self)(self.cluster, self.folder, "again")

    def runs(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.harness("status")["runs"]
        return rows

    def records(self) -> list[Record]:
        return [read_record(path) for path in sorted((self.folder / "runs").glob("*/record.json"))]

    def request(self, backend: str) -> RunRequest:
        """Of the only run of a backend."""
        runs = read_matrix(self.folder / self.jobs).runs
        (found,) = (run.request for run in runs if run.request.backend == backend)
        return found

    def directory(self, backend: str) -> Path:
        return self.folder / "runs" / self.request(backend).run_id

    def job(self, backend: str) -> str:
        """Slurm's name of the job of a backend's only run."""
        return read_jobs(self.folder / self.jobs)[self.request(backend).run_id]

    def without(self, backend: str) -> Self:
        """The same matrix, of which the runs of a backend are never submitted."""
        path = self.folder / self.jobs / MATRIX_NAME
        document = json.loads(path.read_text())
        document["runs"] = [run for run in document["runs"] if run["request"]["backend"] != backend]
        path.write_text(json.dumps(document))
        return self

    def wait_for_steps(self, backend: str, steps: int = 4) -> Path:
        """The folder of a run as soon as each of its ranks has taken so many steps."""
        directory, size = self.directory(backend), self.request(backend).world_size

        def trained() -> bool:
            files = [directory / f"rank-{rank:05d}.jsonl" for rank in range(size)]
            return all(steps_taken(file) >= steps for file in files)

        wait_for(trained, f"{steps} steps in {directory}", 300)
        return directory

    def wait_until_over(self, seconds: float = 90) -> None:
        """Until no job of the matrix waits or runs."""
        jobs = read_jobs(self.folder / self.jobs).values()
        self.cluster.wait_for_jobs(list(jobs), self.folder, seconds)


def render(
    cluster: SlurmCluster,
    folder: Path,
    *words: str,
    steps: int = 8,
    time_limit: str = "00:10:00",
    notice_seconds: int = 30,
    requeue: bool = False,
    site: str = "",
) -> RenderedMatrix:
    folder.mkdir(parents=True, exist_ok=True)
    text = SITE.format(
        python=sys.executable, time_limit=time_limit, notice_seconds=notice_seconds, requeue=requeue
    )
    (folder / "site.yaml").write_text(text + site)
    (folder / "job.yaml").write_text(SMALL.format(steps=steps))
    cluster.harness(
        "slurm", "render", "--site", "site.yaml", "--config", "job.yaml", "-o", "jobs", *words, cwd=folder
    )
    return RenderedMatrix(cluster, folder)


SLOW_LINK = "10mbit"
"""Over it ranks wait for each other most of the time, so that an endless run leaves the cores to others."""
TWO_NODES = ("--backends", "ddp", "--nodes", "2", "--nproc", "1")


def started(cluster: SlurmCluster, folder: Path, **site: object) -> RenderedMatrix:
    """DDP on two nodes over a slow link, submitted; its reference would never end either and is left out."""
    cluster.nodes.shape(SLOW_LINK)
    matrix = render(cluster, folder, *TWO_NODES, steps=ENDLESS, **site)  # type: ignore[arg-type]
    matrix.without("single").harness("submit")
    return matrix


def collected(matrix: RenderedMatrix) -> Record:
    """The record of a run that is over and had trained on both nodes."""
    record = collected_anyhow(matrix)
    assert len(trained_on(record)) == 2
    return record


def collected_anyhow(matrix: RenderedMatrix) -> Record:
    """The record of a run that is over, however far it came."""
    matrix.wait_until_over()
    matrix.harness("collect")
    (record,) = matrix.records()
    return record


def trained_on(record: Record) -> set[str]:
    """Hosts of a run that took steps and knows the loss of each."""
    assert record.steps
    assert all(step.loss is not None for step in record.steps)
    return {rank.host for rank in record.ranks}


def nodes_of(matrix: RenderedMatrix, backend: str) -> list[str]:
    """Names of the nodes that the job of a backend's only run has now."""
    cluster, folder, job = matrix.cluster, matrix.folder, matrix.job(backend)
    listed = cluster.command("squeue", "-h", "-j", job, "-o", "%N", cwd=folder).stdout.strip()
    return cluster.command("scontrol", "show", "hostnames", listed, cwd=folder).stdout.split()


def reason(record: Record) -> tuple[str, str]:
    """Status and kind of error."""
    return record.status, record.error.kind


def measured_fabric(
    cluster: SlurmCluster, folder: Path, *words: str, ranks_per_node: int = 1
) -> FabricResult:
    """Start `harness fabric` by srun and torchrun; its result stays in `folder`/fabric.json."""
    cluster.command(
        "srun", "--nodelist=node1,node2", "--ntasks-per-node=1",
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks_per_node}",
        "--rdzv-backend=c10d", "--rdzv-id=1", "--rdzv-endpoint=node1:29123", "-m", "harness", "fabric",
        "--device", "cpu", "--output", folder / "fabric.json", *words,
        cwd=folder, GLOO_SOCKET_IFNAME="hsn0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    return read_fabric(folder / "fabric.json")
