"""Runs of different jobs: what differs, what parts first, and the one setting that makes the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.diagnose.jobs import FILES, JobsDiagnosis, diagnose_jobs, with_setting
from harness.diagnose.pair import LoadedRun
from harness.errors import HarnessError
from harness.record import Record
from tests.harness.cli.command_line import SHORT, harness
from tests.records import make_record

pytestmark = pytest.mark.long(seconds=20)

OTHER = ["--set", "optimizer.beta2=0.5", "--set", "training.activation_checkpointing=true"]


def of(baseline: Record, other: Record) -> JobsDiagnosis:
    pair = LoadedRun(path=Path("a"), record=baseline), LoadedRun(path=Path("b"), record=other)
    return diagnose_jobs(pair, print, reruns=False)


def another(**changes: object) -> Record:
    return make_record(label="ddp", job_id="b" * 12, **changes)


def with_step(record: Record, step: int, **changes: object) -> Record:
    steps = list(record.steps)
    steps[step] = type(steps[step])(**(vars_of(steps[step]) | changes))
    return record.model_copy(update={"steps": steps})


def vars_of(step: object) -> dict[str, object]:
    return {name: getattr(step, name) for name in step.__dataclass_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"sample_hashes": "ab", "loss": 9.0}, "what the samples hold"),
        ({"loss": 9.0, "gradient_norm": 99.0}, "loss"),
        ({"gradient_norm": 99.0}, "gradient norm"),
        ({"learning_rate": 0.5}, "learning rate"),
    ],
)
def test_the_figure_that_differs_first_is_named_with_its_step(changes: dict, figure: str) -> None:
    found = of(make_record(label="ddp"), with_step(another(training={"seed": 3}), 1, **changes))
    assert found.parting is not None
    assert (found.parting.step, found.parting.figure) == (1, figure)
    assert found.verdict().endswith("trained different jobs and diverge in step 1")
    assert "--rerun" in list(found.sentences())[-1]
    json.dumps(found.as_json())


def test_settings_that_change_rounding_only_are_told_apart() -> None:
    found = of(make_record(label="ddp"), another(training={"activation_checkpointing": True, "seed": 3}))
    effects = {changed.setting: changed.effect for changed in found.settings}
    assert effects == {"training.activation_checkpointing": "rounding", "training.seed": "mathematics"}
    assert found.clean
    assert "no loss or norm differs beyond rounding" in found.verdict()


def test_a_global_batch_is_cut_as_the_baseline_cuts_its_own() -> None:
    changed = with_setting(
        make_record(label="ddp"), another(training={"global_batch_size": 16}), "training.global_batch_size"
    )
    assert (changed.world.micro_batch_size, changed.world.accumulation_steps) == (8, 1)
    assert changed.job.training.global_batch_size == 16


def test_files_that_changed_cannot_be_tried_alone() -> None:
    found = of(make_record(label="ddp"), another())
    assert [changed.setting for changed in found.settings] == [FILES]
    with pytest.raises(HarnessError, match="both jobs name the same files"):
        with_setting(make_record(label="ddp"), another(), FILES)


def test_a_rerun_finds_the_setting_that_makes_the_difference(tmp_path: Path) -> None:
    for name, settings in (("first", []), ("second", OTHER)):
        done = harness("run", "--backend", "single", *SHORT, *settings, "--runs", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    runs = [str(next((tmp_path / name).glob("*-single-*"))) for name in ("first", "second")]
    done = harness("diagnose", *runs, "--rerun", "--json", "--strict", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "optimizer.beta2 makes the difference"
    assert told["blamed"] == ["optimizer.beta2"]
    assert told["parts_first"]["step"] > 0, "the first update is the first that a beta can change"
    trials = {trial["setting"]: trial for trial in told["trials"]}
    assert trials["optimizer.beta2"]["share"] == pytest.approx(1.0, abs=1e-3)
    assert trials["training.activation_checkpointing"]["parting_step"] is None
