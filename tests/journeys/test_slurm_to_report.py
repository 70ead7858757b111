"""A matrix for Slurm, its scripts run on this machine, and the report of what they recorded."""

import os
import sys
from pathlib import Path

import pytest

from tests.harness.cli.command_line import SHORT
from tests.harness.slurm.fakes import FakeSlurm
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]


SBATCH = """\
for script; do :; done
n=$(($(cat {folder}/count) + 1)); echo $n >{folder}/count
export SLURM_JOB_ID=$n SLURM_JOB_NODELIST=localhost SLURM_PROCID=0
bash "$script" </dev/null >{folder}/$n.out 2>&1; code=$?
state=COMPLETED; [ $code = 0 ] || state=FAILED
echo "$n|$state|$code:0|1|localhost||" >>{folder}/accounts
echo "$n;cluster\""""
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'


class RunningSlurm(FakeSlurm):
    """`sbatch` returns when the job is over; one node, which is this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "accounts").touch()
        self._write("sbatch", SBATCH.format(folder=folder))
        self._write("srun", SRUN)
        self._write("sacct", f"cat {folder}/accounts")
        self._write("scontrol", "echo localhost")

    @property
    def path(self) -> str:
        """The value of PATH with these commands first."""
        return f"{self.folder}:{os.environ['PATH']}"

    def outputs(self) -> str:
        """What the jobs wrote."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))


def test_rendered_scripts_run_and_their_records_are_reported(journey: Journey) -> None:
    site = {"name": "here", "python": sys.executable, "launcher": "torchrun", "cpus_per_rank": 1}
    (journey.folder / "site.yaml").write_text("".join(f"{key}: {value}\n" for key, value in site.items()))
    slurm = RunningSlurm(journey.folder / "slurm")
    journey.harness(
        "slurm", "render", "--site", "site.yaml", "--backends", "fsdp", "--nproc", "2", *SHORT, "--set",
        "compare.noise_runs=false", "-o", "jobs",
    )  # fmt: skip
    submitted = journey.harness("slurm", "submit", "jobs", "--wait", PATH=slurm.path)
    found = {record.backend.label: record for record in journey.records()}
    assert {label: record.status for label, record in found.items()} == dict.fromkeys(
        ("single", "fsdp"), "ok"
    ), submitted.stderr + slurm.outputs()
    assert all(record.environment.slurm is not None for record in found.values())
    collected = journey.harness("slurm", "collect", "jobs", PATH=slurm.path)
    assert collected.stdout.count("recorded  COMPLETED  ok") == len(found)
    assert "2" in journey.harness("slurm", "status", "jobs", PATH=slurm.path).stdout
    assert len(journey.harness("list").stdout.splitlines()) > 2
    journey.harness("report", "runs", "-o", "report.md")
    assert "tight" in journey.read("report.md")
    assert "holds; 2 records unchanged" in journey.harness("verify", "report.md").stdout
