"""Rows of scripts: figures only of the strategy that was given, and a record however a run ended."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.job.experiment import MeasureSection
from harness.judge.agreement.parity import measure_noise
from harness.judge.comparison import Comparison
from harness.launch.owner import OWNER_NAME, note_owner, record_abandoned
from harness.record import ErrorPart, Record
from harness.record.run import ObservationPart, seen_job
from harness.run_directory.observed_record import ObserveRequest, ScriptRow, told_apart
from harness.tell.first_page import same_training
from harness.tell.pictures.plots import loss_picture
from tests.records import changed, make_record


def script(label: str, base: str | None, **changes: Any) -> Record:
    record = make_record(label=label)
    seen = ObservationPart(command=["train.py"], frameworks=["accelerate"], base=base, judged_by="ddp")
    return changed(record, observation=seen, backend={"name": f"observed-{base or 'script'}"}, **changes)


@pytest.mark.parametrize(
    ("seen", "given", "reason"),
    [
        ("zero3", "zero3", None),
        ("ddp", None, None),
        ("ddp", "zero3", "the script trains under ddp where it was given zero3"),
        (None, "ddp", "the script trains each process alone where it was given ddp"),
        ("single", "fsdp", "the script trains each process alone where it was given fsdp"),
    ],
)
def test_figures_of_another_strategy_stand_under_no_row(
    seen: str | None, given: str | None, reason: str | None
) -> None:
    record = told_apart(script(given or "a", seen), ScriptRow(label=given or "a", key="k", strategy=given))
    assert record.reasons == ([reason] if reason else [])
    assert record.status == ("unsupported" if reason else "ok")
    assert bool(record.steps) is (reason is None)
    base = script("ddp", "ddp")
    found = {finding.id for finding in Comparison([base, record]).findings if reason}
    assert not found & {"ranks-alone", "communication-differs", "memory-differs"}


def test_a_failed_run_under_another_strategy_keeps_its_error_and_no_figure() -> None:
    error = ErrorPart(kind="OutOfMemory", message="planted")
    failed = script("zero3", "ddp", status="oom", error=error)
    record = told_apart(failed, ScriptRow(label="zero3", key="k", strategy="zero3"))
    assert (record.status, record.error, record.steps) == ("oom", error, [])


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16"])
def test_a_script_whose_job_is_known_in_part_is_judged_in_every_precision(precision: str) -> None:
    seen = {"training.precision": precision, "optimizer.kind": "adamw", "model.dropout": 0.0}
    job = seen_job(seen)
    base, other = (script(label, label, job=job) for label in ("ddp", "zero2"))
    assert measure_noise(base, ()).tight.loss > 0
    rows = {row.backend: row.judgement.parity for row in Comparison([base, other]).rows}
    assert rows["ddp"] == "exact"
    assert rows["zero2"] in ("exact", "tight", "band")


def test_a_command_whose_observer_was_killed_has_a_record(tmp_path: Path) -> None:
    folder = tmp_path / "20261129-120000-observed-ddp-abcdef"
    folder.mkdir()
    ObserveRequest(
        run_id=folder.name, created_at="2026-11-29T12:00:00+00:00", command=["harness", "compare"],
        observed=["train.py"], measure=MeasureSection(), row=ScriptRow(label="ddp", key="k" * 16),
    ).write(folder)  # fmt: skip
    note_owner(folder)
    assert list(record_abandoned(tmp_path)) == []  # this process is alive
    note = json.loads((folder / OWNER_NAME).read_text())
    (folder / OWNER_NAME).write_text(json.dumps(note | {"process": 9999999}))
    (record,) = record_abandoned(tmp_path)
    assert (record.status, record.error.kind, record.backend.label) == ("failed", "LauncherLost", "ddp")
    assert not (folder / OWNER_NAME).exists()


def test_the_base_of_scripts_is_what_others_lie_from() -> None:
    seen = {"training.precision": "fp32", "optimizer.kind": "adamw", "model.dropout": 0.0}
    base, other = (script(label, label, job=seen_job(seen)) for label in ("ddp", "zero2"))
    steps = [replace(step, loss=(step.loss or 0.0) + 1e-6) for step in other.steps]
    comparison = Comparison([base, other.model_copy(update={"steps": steps})])
    picture = loss_picture(comparison)
    assert "1 cell within the limit, at most 1.0e-06 from the reference" in picture.alt
    assert same_training(comparison).startswith("yes")
    assert "1 of 1 agree (largest difference of a loss 1.0e-06" in same_training(comparison)
