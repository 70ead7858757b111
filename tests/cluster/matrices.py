"""Small matrices for the tests on a cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def rendered_again(self, *words: str) -> RenderedMatrix:
        """What the same site and job still lack, rendered beside the first matrix."""
        self.cluster.harness(
            "slurm", "render", "--site", "site.yaml", "--config", "job.yaml", "-o", "again", *words,
            cwd=self.folder,
        )  # fmt: skip
        return RenderedMatrix(self.cluster, self.folder, "again")

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

    def without(self, backend: str) -> RenderedMatrix:
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
