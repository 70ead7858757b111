"""Runs of different jobs: what differs, what parts first, and the one setting that makes the difference."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.diagnose import jobs
from harness.diagnose.rerun import LoadedRun
from harness.errors import HarnessError
from harness.judge.agreement.job_equivalence import from_step
from harness.judge.distance import step_pairs
from harness.record import Record, ResumedPart
from harness.record.run import ObservationPart
from harness.record.store import write_record
from tests.harness.cli.command_line import SHORT, harness
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

pytestmark = pytest.mark.long(seconds=10)

OTHER = ["--set", "optimizer.beta2=0.5", "--set", "training.activation_checkpointing=true"]


def of(baseline: Record, other: Record) -> jobs.JobsDiagnosis:
    pair = LoadedRun(path=Path("a"), record=baseline), LoadedRun(path=Path("b"), record=other)
    return jobs.diagnose_jobs(pair, print, reruns=False)


def another(**changes: object) -> Record:
    return make_record(label="ddp", job_id="b" * 12, **changes)


def with_step(record: Record, step: int, **changes: object) -> Record:
    steps = list(record.steps)
    steps[step] = replace(steps[step], **changes)
    return record.model_copy(update={"steps": steps})


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
    assert (found.parting.step, found.parting.figure) == (1, figure)
    assert found.verdict().endswith("trained different jobs and diverge in step 1")
    assert "--rerun" in list(found.sentences())[-1]
    json.dumps(found.as_json())


def test_settings_that_change_rounding_only_are_told_apart() -> None:
    found = of(make_record(label="ddp"), another(training={"activation_checkpointing": True, "seed": 3}))
    effects = {changed.setting: changed.effect for changed in found.settings}
    assert effects == {"training.activation_checkpointing": "rounding", "training.seed": "mathematics"}
    assert found.clean
    assert "no loss, norm or weight differs beyond rounding" in found.verdict()


def test_a_global_batch_is_cut_as_the_baseline_cuts_its_own() -> None:
    changed = jobs.with_setting(
        make_record(label="ddp"), another(training={"global_batch_size": 16}), "training.global_batch_size"
    )
    assert (changed.world.micro_batch_size, changed.world.accumulation_steps) == (8, 1)
    assert changed.job.training.global_batch_size == 16


def sketched(shift: float) -> dict[str, list[float]]:
    return {"w": [10.0, *[3.0 + shift] * 8]}


def test_every_figure_that_differs_is_named_at_its_first_step() -> None:
    baseline = make_record(label="ddp", initial_weights=make_weights(sketch=sketched(0.0)),
                           final_weights=make_weights("b" * 64, sketched(1.0)))  # fmt: skip
    losses = [loss + 0.25 * (step > 1) for step, loss in enumerate(LOSSES)]
    other = another(
        training={"seed": 3}, steps=make_steps(losses, changes={1: {"learning_rate": 0.5}}),
        initial_weights=make_weights("c" * 64, sketched(2.0)),
        final_weights=make_weights("d" * 64, sketched(4.0)),
    )  # fmt: skip
    found = of(baseline, other)
    assert [(one.figure, one.when) for one in found.partings] == [
        ("initial weights", "before step 0"), ("learning rate", "in step 1"), ("loss", "in step 2"),
        ("final weights", f"after step {len(LOSSES) - 1}"),
    ]  # fmt: skip
    # Projections give 2.0 of a norm of 10, and 3.0 where the baseline moved by 1.0.
    assert [found.partings[i].difference for i in (0, 2, 3)] == pytest.approx([0.2, 0.25, 3.0])
    assert found.verdict().endswith("diverge before step 0")
    assert found.as_json()["parts_first"]["figure"] == "initial weights"


def test_weights_alone_that_end_elsewhere_are_no_agreement() -> None:
    weights = {"initial_weights": make_weights(sketch=sketched(0.0))}
    ends = [make_weights(digest * 64, sketched(shift)) for digest, shift in (("b", 1.0), ("d", 1.5))]
    found = of(make_record(label="ddp", final_weights=ends[0], **weights),
               another(training={"seed": 3}, final_weights=ends[1], **weights))  # fmt: skip
    assert not found.clean
    assert found.verdict().endswith(f"end with different weights after step {len(LOSSES) - 1}")
    start, other = found.baseline.record, found.other.record
    for shift, share in ((1.0, 0.0), (1.2, 0.4), (1.5, 1.0)):
        tried = start.model_copy(update={"final_weights": make_weights("e" * 64, sketched(shift))})
        assert jobs.share_of_weights(start, tried, other) == pytest.approx(share)
    assert jobs.share_of_weights(start, start.model_copy(update={"final_weights": None}), other) is None
    trial = jobs.SettingTrial(setting="a", parting_step=3, figure=jobs.FINAL, share=1.0)
    made = replace(found, trials=(trial,), last_step=3)
    assert made.verdict() == "a makes the difference"
    assert list(made.sentences())[-1] == (
        "a alone: ends with other weights, 100% of the difference up to step 3"
    )


def test_models_of_other_sizes_are_told_before_any_loss() -> None:
    larger = make_weights().model_copy(update={"parameter_count": 2000})
    found = of(make_record(label="ddp"), another(training={"seed": 3}, initial_weights=larger))
    assert [str(one) for one in found.partings] == ["1,000 in the baseline, 2,000 in the other"]


def test_two_precisions_are_judged_alike_whichever_is_the_baseline() -> None:
    fp32 = make_record(label="ddp")
    low = another(training={"precision": "bf16-mixed"}, steps=make_steps([loss + 1e-2 for loss in LOSSES]))
    for pair in ((fp32, low), (low, fp32)):
        found = of(*pair)
        assert (found.parting.figure, found.parting.step) == ("loss", 0)
        assert "rounding of bf16-mixed alone explains" in " ".join(found.sentences())


def test_a_batch_cut_otherwise_is_rounding_unless_the_loss_hangs_on_it() -> None:
    changes = {"training": {"micro_batch_size": 2, "accumulation_steps": 2, "seed": 3}}
    for model, effect in (({}, "rounding"), ({"dropout": 0.1}, "mathematics")):
        found = of(make_record(label="ddp", model=model), another(model=model, **changes))
        effects = {changed.setting: changed.effect for changed in found.settings}
        assert effects["training.accumulation_steps"] == effects["training.micro_batch_size"] == effect
    assert "may be chance" in " ".join(found.sentences())


def test_a_share_is_of_whole_curves_and_of_norms_where_losses_agree() -> None:
    def record(loss: float = 0.0, norm: float = 0.0) -> Record:
        steps = make_steps([one + loss * step for step, one in enumerate(LOSSES)],
                           [one + norm * step for step, one in enumerate(NORMS)])  # fmt: skip
        return make_record(label="ddp", steps=steps)

    start = record()

    def share(part: Record, whole: Record) -> float | None:
        return jobs.share_of(step_pairs(start, part), step_pairs(start, whole), jobs.limits_of(start, whole))

    assert share(record(loss=0.05), record(loss=0.2, norm=0.1)) == pytest.approx(0.25)
    # Losses differ by less than rounding: their ratio of 9 says nothing.
    assert share(record(loss=9e-8, norm=0.1), record(loss=1e-8, norm=0.1)) == pytest.approx(1.0)
    assert share(record(), record()) is None
    lost = record().model_copy(update={"steps": make_steps([*LOSSES[:-1], None], NORMS)})
    last = record().model_copy(update={"steps": make_steps([*LOSSES[:-1], LOSSES[-1] + 1], NORMS)})
    assert share(lost, last) is None
    assert (share(lost, lost), share(last, lost)) == (1.0, 0.0)
    assert jobs.find_partings(start, record(loss=1e-8), jobs.limits_of(start, start)) == []


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({"a": 1.0, "b": 0.1}, "a makes the difference"),
        ({"a": 0.9, "b": 1.1}, "a and b each make the difference"),
        (
            {"a": 0.01, "b": 1.33, "c": -0.2, "d": 0.0},
            "no single setting makes the difference; alone they make: b 133%, c -20%, a 1%",
        ),
        ({"a": math.nan}, "no single setting makes the difference"),
        ({"a": None}, "up to step 3 no loss or norm differs beyond rounding: no setting is blamed"),
    ],
)
def test_a_verdict_says_how_much_each_setting_makes_alone(shares: dict, verdict: str) -> None:
    parted = with_step(another(training={"seed": 3}), 1, loss=9.0)
    found = of(make_record(label="ddp"), parted)
    trials = tuple(
        jobs.SettingTrial(setting=name, parting_step=1, not_finite=1)
        if share is not None and math.isnan(share)
        else jobs.SettingTrial(setting=name, parting_step=1, share=share)
        for name, share in shares.items()
    )
    assert replace(found, trials=trials, last_step=3).verdict() == verdict


@pytest.mark.parametrize("figure", ["loss", "gradient norm"])
def test_what_is_not_finite_in_one_run_alone_differs_there(figure: str) -> None:
    name = figure.replace(" ", "_")
    left, right = make_record(label="ddp"), with_step(another(training={"seed": 3}), 2, **{name: None})
    found = of(left, right)
    (one,) = found.partings
    assert (one.figure, one.when, one.difference) == (figure, "in step 2", None)
    assert str(one).endswith("in the baseline, not finite in the other")
    assert of(right, left).partings[0].baseline == "not finite"
    assert not of(right, right.model_copy(update={"job_id": "c" * 12})).partings
    json.dumps(found.as_json())


def test_a_trial_that_is_not_finite_is_not_said_to_change_nothing() -> None:
    found = of(make_record(label="ddp"), with_step(another(training={"seed": 3}), 1, loss=9.0))
    trials = (jobs.SettingTrial(setting="a", parting_step=1, not_finite=2),)
    told = list(replace(found, trials=trials, last_step=3).sentences())
    assert told[-1] == "a alone: diverges in step 1, not finite in step 2"


@pytest.mark.parametrize(("factor", "parts"), [(1 + 2**-52, False), (1 + 2**-24, False), (1 + 2**-20, True)])
def test_a_rate_in_another_order_of_operations_is_the_same_rate(factor: float, parts: bool) -> None:
    left = make_record(label="ddp", steps=make_steps(changes={1: {"learning_rate": 1e-3}}))
    steps = make_steps(changes={1: {"learning_rate": 1e-3 * factor}})
    found = of(left, another(training={"seed": 3}, steps=steps)).partings
    assert [one.figure for one in found] == ["learning rate"] * parts
    # Seven digits are equal: the values are told with as many as differ.
    assert [str(one).split(";")[0] for one in found] == [
        "0.001 in the baseline, 0.00100000095 in the other"
    ] * parts


def test_a_gradient_where_the_baseline_has_none_differs() -> None:
    left = make_record(label="ddp", steps=make_steps(norms=[0.0, *NORMS[1:]]))
    found = of(left, another(training={"seed": 3})).partings
    assert [(one.figure, one.step, one.difference) for one in found] == [("gradient norm", 0, None)]


def test_a_resumed_run_is_compared_from_its_first_step_on() -> None:
    begun = ResumedPart(format="native", run_id="r", backend="ddp", world_size=2, step=2)
    other = from_step(another(training={"seed": 3}, initial_weights=make_weights("e" * 64)), 2)
    other = other.model_copy(update={"resumed": begun})
    assert of(make_record(label="ddp"), other).clean
    parted = of(make_record(label="ddp"), with_step(other, 1, loss=9.0))
    assert [(one.figure, one.when) for one in parted.partings] == [("loss", "in step 3")]
    assert "continued the checkpoint of step 2" in " ".join(parted.cautions)


def test_rounding_is_what_repetitions_beside_the_run_show(tmp_path: Path) -> None:
    def stored(name: str, record: Record) -> LoadedRun:
        (tmp_path / name).mkdir()
        return LoadedRun(path=write_record(tmp_path / name, record).resolve(), record=record)

    def shifted(by: float) -> list:
        return make_steps([loss + by for loss in LOSSES])

    pair = (
        stored("left", make_record(label="ddp")),
        stored("right", another(training={"seed": 3}, steps=shifted(1e-3))),
    )
    assumed = jobs.diagnose_jobs(pair, print, reruns=False)
    assert [one.figure for one in assumed.partings] == ["loss"]
    assert "rounding was not measured" in " ".join(assumed.cautions)
    stored("a-single-n1-r0-0", make_record())
    split = "single:micro_batch_size=4"
    stored("a-single-n1-r0-1", make_record(label=split, run_id="split", steps=shifted(1e-4)))
    measured = jobs.diagnose_jobs(pair, print, reruns=False)
    # Ten times 1e-4 from the reference, for each of both.
    assert measured.clean
    assert not measured.cautions


def test_settings_that_cannot_be_tried_are_not_said_to_change_nothing() -> None:
    found = of(make_record(label="ddp"), with_step(another(training={"seed": 3}), 1, loss=9.0))
    trials = (jobs.SettingTrial(setting="a", why_not="no room"),)
    for made in (trials, ()):
        verdict = replace(found, trials=made, last_step=3).verdict()
        assert verdict.endswith("diverge in step 1, and no setting could be tried alone")


def test_initial_weights_of_unknown_distance_differ_all_the_same() -> None:
    other = another(training={"seed": 3}, initial_weights=make_weights("c" * 64))
    found = of(make_record(label="ddp"), other)
    assert [str(one) for one in found.partings] == ["by how much is not known"]


def test_files_that_changed_cannot_be_tried_alone() -> None:
    found = of(make_record(label="ddp"), another())
    assert [changed.setting for changed in found.settings] == [jobs.FILES]
    with pytest.raises(HarnessError, match="both jobs name the same files"):
        jobs.with_setting(make_record(label="ddp"), another(), jobs.FILES)


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


def test_what_a_script_does_not_compute_in_a_step_is_not_said_to_be_not_finite() -> None:
    seen = ObservationPart(command=["python", "train.py"], frameworks=[])
    script = another(training={"seed": 3}, observation=seen)
    for name in ("loss", "gradient_norm"):
        assert not of(make_record(label="ddp"), with_step(script, 2, **{name: None})).partings
