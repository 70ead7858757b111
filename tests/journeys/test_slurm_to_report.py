"""A matrix for Slurm, its scripts run on this machine, and the report of what they recorded."""

import sys

import pytest

from tests.harness.cli.command_line import SHORT
from tests.journeys.journey import Journey
from tests.journeys.running_slurm import RunningSlurm

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=60)]


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
