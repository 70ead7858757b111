"""The Python interface on every kind of record: compared, failed, unsupported, observed, in an archive."""

import shutil
from pathlib import Path

import pytest

import harness
from tests.docs.markdown import ROOT
from tests.journeys.journey import Journey

pytestmark = pytest.mark.long(seconds=25)
SETTINGS = {
    "training.steps": 4, "measure.warmup_steps": 1, "measure.probed_steps": 1, "compare.noise_runs": False,
}  # fmt: skip
FAULTY = """
import os
import torch
import own_model

class Faulty(own_model.Regression):
    def forward(self, features):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ.get("RANK") == "1" and self.training and self.calls > 2:
            raise RuntimeError("a planted fault")
        return super().forward(features)

def model(width=32):
    return Faulty(features=8, width=width, depth=3)
"""


@pytest.fixture(scope="module")
def job(shared_journey: Journey) -> Path:
    """A job of one's own, and a model of it that fails on rank 1."""
    for name in ("own-model.yaml", "own_model.py"):
        (shared_journey.folder / name).write_text((ROOT / "configs" / name).read_text())
    (shared_journey.folder / "faulty.py").write_text(FAULTY)
    return shared_journey.folder / "own-model.yaml"


@pytest.fixture(scope="module")
def compared(job: Path) -> harness.Results:
    return harness.compare(
        job, backends=["ddp", "fsdp-hybrid"], nproc=2, settings=SETTINGS, runs=job.parent / "runs", quiet=True
    )


def read_all(results: harness.Results, folder: Path, *formats: str) -> None:
    """Every way to look at results, and reports in Markdown and these formats."""
    frame = results.to_frame()
    assert len(frame) == len(results.comparison.rows)
    for kind in ("steps", "evaluations", "findings"):
        results.to_frame(kind)  # type: ignore[arg-type]
    document = results.as_json()
    assert len(document["rows"]) + len(document["not_comparable"]) >= len(frame)
    for record in results.records:
        assert record.backend.label in str(results)
    assert results._repr_markdown_().startswith("| ")
    for suffix in ("md", *formats):
        assert results.report(folder / f"api.{suffix}").stat().st_size > 0


def test_a_comparison_has_its_unsupported_cell(compared: harness.Results, job: Path) -> None:
    status = {record.backend.label: record.status for record in compared.records}
    assert status == {"single": "ok", "ddp": "ok", "fsdp-hybrid": "unsupported"}
    read_all(compared, job.parent, "html", "csv", "json")
    frame = compared.to_frame().set_index("backend")
    assert frame.tokens_per_second.isna()["fsdp-hybrid"]
    assert frame.step_seconds["ddp"] > 0


@pytest.mark.exhaustive
def test_one_run_is_read_alone(compared: harness.Results, job: Path) -> None:
    ran = harness.run("ddp", job, nproc=2, settings=SETTINGS, runs=job.parent / "single", quiet=True)
    assert [step.loss for step in ran.record.steps] == pytest.approx(
        [step.loss for record in compared.records if record.backend.label == "ddp" for step in record.steps]
    )
    read_all(ran, job.parent)


@pytest.mark.exhaustive
def test_a_failed_run_raises_one_line_and_leaves_a_record_that_reads(job: Path) -> None:
    planted = SETTINGS | {"model.factory": "faulty:model"}
    runs = job.parent / "failed"
    with pytest.raises(harness.HarnessError, match="a planted fault") as raised:
        harness.run("ddp", job, nproc=2, settings=planted, runs=runs, quiet=True)
    assert "\n" not in str(raised.value)
    failed = harness.load(runs)
    assert failed.record.status == "failed"
    assert "a planted fault" in failed.record.error.message
    read_all(failed, job.parent)


def test_an_observed_script_is_read_as_our_runs_are(
    shared_journey: Journey, bare_model_observed: Path
) -> None:
    shutil.copytree(bare_model_observed, shared_journey.folder / "observed")
    seen = harness.load(shared_journey.folder / "observed")
    assert seen.record.observed is not None
    assert seen.record.status == "ok"
    steps = seen.to_frame("steps")
    assert list(steps.loss) == [step.loss for step in seen.record.steps]
    read_all(seen, shared_journey.folder)


def test_an_archive_has_the_same_figures(compared: harness.Results, shared_journey: Journey) -> None:
    shared_journey.harness("report", "runs", "-o", "out/report.md", "--archive")
    (shared_journey.folder / "runs").rename(shared_journey.folder / "gone")
    packed = harness.load(shared_journey.folder / "out")
    assert packed.to_frame().equals(compared.to_frame())
    assert {r.run_id for r in packed.records} == {r.run_id for r in compared.records}
    read_all(packed, shared_journey.folder)
    assert "holds" in shared_journey.harness("verify", "out/report.md").stdout
