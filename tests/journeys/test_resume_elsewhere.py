"""A run that keeps its checkpoint, resumed in another folder under other backends, and their report."""

import shutil

import pytest

from tests.harness.cli.command_line import SMALL
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.long(seconds=10), pytest.mark.costly]
QUIET = ["--set", "compare.noise_runs=false"]
JOB = [
    *SMALL, "--set", "training.steps=6", "--set", "measure.warmup_steps=1", "--set", "measure.probed_steps=2",
    "--nproc", "2",
]  # fmt: skip


def test_a_checkpoint_is_resumed_in_another_folder_by_another_backend(journey: Journey) -> None:
    saving = ["--set", "measure.checkpoint=neutral", "--set", "measure.keep_checkpoint=true"]
    journey.harness("run", "--backend", "zero3", *JOB, *saving)
    saved = journey.record()
    elsewhere = Journey(journey.folder / "elsewhere")
    elsewhere.folder.mkdir()
    shutil.move(journey.folder / "runs" / saved.run_id, elsewhere.folder / "brought")
    assert "holds no record" in journey.harness("list", code=1).stderr
    elsewhere.harness("compare", "--backends", "ddp,fsdp", *JOB, *QUIET, "--resume-from", "brought")
    found = {record.backend.label: record for record in elsewhere.records()}
    assert {label: record.status for label, record in found.items()} == dict.fromkeys(
        ("single", "ddp", "fsdp"), "ok"
    )
    whole = {step.step: step.loss for step in saved.steps}
    for label in ("ddp", "fsdp"):
        resumed = found[label]
        assert resumed.resumed.run_id == saved.run_id
        for step in resumed.steps:
            assert step.loss == pytest.approx(whole[step.step], abs=5e-6)
        assert len(resumed.steps) < len(whole)
    assert "resumed" in elsewhere.harness("show", found["fsdp"].run_id).stdout
    elsewhere.harness("report", "runs", "-o", "report.md")
    assert saved.run_id in elsewhere.read("report.details.md") + elsewhere.read("report.md")
    assert "records unchanged" in elsewhere.harness("verify", "report.md").stdout
