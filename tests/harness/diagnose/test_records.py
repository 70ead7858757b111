"""What records alone say of two runs."""

from pathlib import Path

from harness.diagnose.diagnosis import (
    NOT_CONTINUED,
    NOT_RERUN,
    OTHER_TRAINING,
    about_job,
    about_replicas,
    about_settings,
    diagnose,
    how_far,
    steps_to_examine,
)
from harness.diagnose.rerun import LoadedRun
from harness.judge.agreement.job_equivalence import Difference, from_step
from harness.judge.agreement.parity import Tolerance
from harness.judge.distance import distance
from harness.judge.effective import SettingDifference, setting_differences
from harness.judge.wording import Digest
from harness.record import ObservationPart, ObservedPart, ResumedPart
from harness.record.store import write_record
from tests.records import LOSSES, NORMS, make_effective, make_record, make_steps

LIMITS = Tolerance(loss=1e-6, norm=1e-6, update=1e-6, weights=1e-6)


def run(**changes) -> LoadedRun:
    return LoadedRun(path=Path("record.json"), record=make_record(**changes))


def difference(setting: str, reference: object, given: object, effect: str = "mathematics"):
    return SettingDifference(setting=setting, effect=effect, reference=reference, given=given)


def test_the_first_steps_are_examined_and_those_up_to_the_parting() -> None:
    assert steps_to_examine(0, 19) == [0]
    assert steps_to_examine(2, 19) == [0, 1, 2]
    assert steps_to_examine(12, 19) == [0, 1, 2, 3, 9, 10, 11, 12]


def test_where_only_weights_differ_the_run_is_examined_to_its_end() -> None:
    assert steps_to_examine(None, 19) == [0, 1, 2, 3, 16, 17, 18, 19]


def test_a_setting_is_named_with_both_sides() -> None:
    (said,) = about_settings(
        [difference("gradient clipping", "none", "1")], run(), run(label="ddp"), clean=False
    )
    assert said == "suspected setting: gradient clipping: 1 in ddp on 2 ranks, none in single on 1 rank"


def test_of_optimizer_constants_only_those_that_differ_are_shown() -> None:
    groups = make_effective().optimizer_groups
    other = [group | {"betas": [0.9, 0.999]} for group in groups]
    left = run(observed=ObservedPart(optimizer_groups=groups))
    right = run(label="ddp", observed=ObservedPart(optimizer_groups=other))
    (sentence,) = about_settings(setting_differences(left.record, right.record), left, right, clean=False)
    assert sentence.endswith("betas [0.9, 0.999] in ddp on 2 ranks, betas [0.9, 0.95] in single on 1 rank")


def test_of_lists_only_what_is_not_on_both_sides_is_shown() -> None:
    found = difference("frozen parameters", ["a"], ["a", "b"])
    (sentence,) = about_settings([found], run(), run(label="ddp"), clean=False)
    assert sentence.endswith("frozen parameters: b in ddp on 2 ranks, none in single on 1 rank")


def test_settings_that_change_cost_only_are_no_suspects() -> None:
    assert not list(
        about_settings([difference("prefetch", "1", "2", "cost")], run(), run(label="ddp"), clean=False)
    )


def test_ranks_that_end_with_different_weights_are_named() -> None:
    other = run(label="ddp")
    ranks = [
        rank.model_copy(update={"final_digest": "a" if rank.rank == 0 else "b"})
        for rank in other.record.ranks
    ]
    broken = LoadedRun(path=other.path, record=other.record.model_copy(update={"ranks": ranks}))
    assert list(about_replicas(broken)) == [
        "ranks of ddp on 2 ranks end with different weights: rank 0 against rank 1"
    ]
    assert not list(about_replicas(other))


def test_distances_are_told_beside_their_noise() -> None:
    steps = make_steps([*LOSSES[:3], LOSSES[3] + 0.5])
    found = distance(make_record(), make_record(label="ddp", steps=steps))
    assert how_far(found, LIMITS).startswith("largest differences: loss 5.0e-01 nats (noise: 1.0e-06)")


def test_a_loss_is_told_in_nats_and_a_norm_in_percent() -> None:
    steps = make_steps(norms=[norm * 1.02 for norm in NORMS])
    found = distance(make_record(), make_record(label="ddp", steps=steps))
    assert "gradient norm 2.0 % (noise: 0.00010 %)" in how_far(found, LIMITS)


def test_another_training_is_named_by_field_with_digests_cut_short() -> None:
    found = Difference("initial weights", Digest("a" * 64), Digest("b" * 64))
    assert list(about_job([found], run(label="ddp"))) == [
        "not the same training: initial weights: bbbbbbbbbbbb in ddp on 2 ranks, aaaaaaaaaaaa in the baseline"
    ]


def test_a_script_is_compared_by_its_record_alone() -> None:
    part = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")
    own, said = run(label="ddp"), []
    script = LoadedRun(
        path=Path("script.json"),
        record=make_record(label="observed-ddp", job_id="another").model_copy(update={"observation": part}),
    )
    equal = diagnose((script, own), said.append)
    assert (equal.baseline, equal.clean, equal.verdict) == (own, True, None)
    apart = make_steps(losses=[loss + 0.5 * (step > 1) for step, loss in enumerate(LOSSES)])
    record = script.record.model_copy(update={"steps": apart})
    parted = diagnose((own, LoadedRun(path=script.path, record=record)), said.append)
    assert (parted.clean, parted.parting_step, parted.verdict) == (False, 2, None)
    assert any(said.startswith("loss differs first, in step 2: ") for said in parted.explanation)
    assert NOT_RERUN in parted.explanation
    assert said == []


def test_a_resumed_run_is_compared_by_true_steps_and_not_run_again(tmp_path: Path) -> None:
    begun = ResumedPart(format="native", run_id="r", backend="ddp", world_size=2, step=2)
    for number, label in enumerate(("single", "single:micro_batch_size=4,norm=fp32,backward=reordered")):
        folder = tmp_path / f"a-single-n1-r0-{number}"
        folder.mkdir()
        write_record(folder, make_record(label=label, run_id=label))
    losses = [*LOSSES[2:3], LOSSES[3] + 0.5]
    own = LoadedRun(path=tmp_path / "own" / "record.json", record=make_record(label="ddp"))

    def resumed(losses: list) -> LoadedRun:
        made = from_step(make_record(label="zero3", steps=make_steps([*LOSSES[:2], *losses])), 2)
        made = made.model_copy(update={"resumed": begun})
        return LoadedRun(path=tmp_path / "resumed" / "record.json", record=made)

    said: list[str] = []
    assert diagnose((resumed(list(LOSSES[2:])), own), said.append).clean
    parted = diagnose((resumed(losses), own), said.append)
    assert (parted.baseline, parted.parting_step, parted.verdict) == (own, 3, None)
    told = " ".join(parted.explanation)
    assert "loss differs first, in step 3" in told
    assert "suspect what it restored from its checkpoint of step 2" in told
    assert NOT_CONTINUED in parted.explanation
    assert said == []


def test_another_training_with_equal_figures_is_called_so() -> None:
    part = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")
    steps = make_steps(changes={2: {"learning_rate": 1.0}})
    script = make_record(label="observed-ddp", job_id="another", steps=steps)
    pair = (
        run(label="ddp"),
        LoadedRun(path=Path("s.json"), record=script.model_copy(update={"observation": part})),
    )
    assert diagnose(pair, lambda _: None).outcome == OTHER_TRAINING
