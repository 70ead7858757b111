"""What records alone say of two runs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.diagnose import diagnosis
from harness.diagnose.jobs import NORM, Parting
from harness.diagnose.rerun import Examined, LoadedRun, compare_tensors
from harness.judge.agreement.job_equivalence import Difference, from_step
from harness.judge.agreement.parity import Tolerance
from harness.judge.distance import distance
from harness.judge.effective import SettingDifference
from harness.judge.wording import Digest
from harness.record import ObservationPart, ObservedPart, Record, ResumedPart
from harness.record.store import write_record
from tests.records import LOSSES, NORMS, changed, make_ranks, make_record, make_steps

from .test_rerun import LIMITS, SKETCH, noise, scaled

ONE_IN_A_MILLION = Tolerance(loss=1e-6, norm=1e-6, update=1e-6, weights=1e-6)


def run(**changes) -> LoadedRun:
    return LoadedRun(path=Path("record.json"), record=make_record(**changes))


@pytest.mark.parametrize(
    ("parting", "steps"),
    [
        (0, [0]),
        (2, [0, 1, 2]),
        (12, [0, 1, 2, 3, 9, 10, 11, 12]),
        (None, [0, 1, 2, 3, 16, 17, 18, 19]),  # only weights differ: to the end
    ],
)
def test_the_first_steps_are_examined_and_those_up_to_the_parting(
    parting: int | None, steps: list[int]
) -> None:
    assert diagnosis.steps_to_examine(parting, 19) == steps


@pytest.mark.parametrize(
    ("setting", "reference", "given", "effect", "asked", "said"),
    [
        ("gradient clipping", "none", "1", "mathematics", "",
         ["may matter: gradient clipping: 1 in ddp on 2 ranks, none in single on 1 rank"]),
        ("gradient clipping", "none", "1", "mathematics", "training.gradient_clipping", []),  # of the job
        ("frozen parameters", ["a"], ["a", "b"], "mathematics", "learning rate of step 0",
         ["also differs: frozen parameters: b in ddp on 2 ranks, none in single on 1 rank"]),
        ("frozen parameters", ["a"], ["a", "b"], "mathematics", "",  # only what is not on both sides
         ["may matter: frozen parameters: b in ddp on 2 ranks, none in single on 1 rank"]),
        ("dtype of gradients", "bfloat16", "float32", "mathematics", "",  # as of sound libraries
         ["also differs: dtype of gradients: float32 in ddp on 2 ranks, bfloat16 in single on 1 rank"]),
        ("prefetch", "1", "2", "cost", "", []),
    ],
)  # fmt: skip
def test_a_setting_that_changes_the_mathematics_is_named_with_both_sides(
    setting: str, reference: object, given: object, effect: str, asked: str, said: list[str]
) -> None:
    found = SettingDifference(setting=setting, effect=effect, reference=reference, given=given)
    job = [Difference(asked, 1, 2)] if asked else []
    assert list(diagnosis.about_settings([found], run(), run(label="ddp"), job, clean=False)) == said


def test_ranks_that_end_with_different_weights_are_named() -> None:
    broken = run(label="ddp", ranks=make_ranks(2, final_digest=["a", "b"]))
    said = ["ddp on 2 ranks: replicas diverge: final weights of ranks 0 against ranks 1"]
    for pair, times in (((broken, run(label="ddp")), 1), ((broken, broken), 2)):
        assert diagnosis.about_each(*pair) == {"replicas-differ": said * times}
    assert diagnosis.about_each(run(label="ddp"), run(label="zero2")) == {}


def test_the_run_that_shows_its_fault_by_itself_is_named_in_either_order() -> None:
    scripts = {}
    for name, factor in (("sound", 1.0), ("twice", 0.25)):
        seen = ObservationPart(command=[name], frameworks=["deepspeed"], base="zero2", backward_ratio=factor)
        record = run(
            label="observed-zero2", run_id=name, observation=seen,
            steps=make_steps([factor * loss for loss in LOSSES], [factor * norm for norm in NORMS]),
        ).record  # fmt: skip
        record = changed(record, world={"accumulation_steps": 4})
        scripts[name] = LoadedRun(path=Path("record.json"), record=record, place=name)
    for pair in (["sound", "twice"], ["twice", "sound"]):
        said = diagnosis.diagnose((scripts[pair[0]], scripts[pair[1]]), lambda _: None).explanation
        causes = [text for text in said if "accumulation steps" in text or "micro-steps" in text]
        assert [text.partition(" is")[0] for text in causes] == [
            "observed-zero2 on 2 ranks (twice): the loss of each of 4 micro-steps"
        ]


def test_distances_are_told_beside_their_noise_a_loss_in_nats_and_a_norm_in_percent() -> None:
    steps = make_steps([*LOSSES[:3], LOSSES[3] + 0.5], [norm * 1.02 for norm in NORMS])
    found = distance(make_record(), make_record(label="ddp", steps=steps))
    told = diagnosis.how_far(found, ONE_IN_A_MILLION)
    assert told.startswith("largest differences: loss 5.0e-01 nats (noise: 1.0e-06)")
    assert "gradient norm 2.0 % (noise: 0.00010 %)" in told


def test_another_training_is_named_by_field_with_digests_cut_short() -> None:
    found = Difference("initial weights", Digest("a" * 64), Digest("b" * 64))
    assert list(diagnosis.about_job([found], run(label="ddp"))) == [
        "not the same training: initial weights: bbbbbbbbbbbb in ddp on 2 ranks, aaaaaaaaaaaa in the baseline"
    ]


def test_a_script_is_compared_by_its_record_alone() -> None:
    part = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")
    own, said = run(label="ddp"), []
    script = run(label="observed-ddp", job_id="another", observation=part)
    equal = diagnosis.diagnose((script, own), said.append)
    assert (equal.baseline, equal.clean, equal.verdict) == (own, True, None)
    apart = make_steps(losses=[loss + 0.5 * (step > 1) for step, loss in enumerate(LOSSES)])
    record = script.record.model_copy(update={"steps": apart})
    parted = diagnosis.diagnose((own, LoadedRun(path=script.path, record=record)), said.append)
    assert (parted.clean, parted.parting_step, parted.verdict) == (False, 2, None)
    assert any(said.startswith("loss differs first, in step 2: ") for said in parted.explanation)
    assert diagnosis.NOT_RERUN in parted.explanation
    assert parted.table()[1::3] == [
        "update-differs/restored | resumed = not seen",
        "update-differs/buffers | buffers = none",
        "loss-of-one-rank/one-rank | loss of rank 0 = no",
    ]
    assert said == []


def test_a_resumed_run_is_compared_by_true_steps_and_not_run_again(tmp_path: Path) -> None:
    begun = ResumedPart(format="native", run_id="r", backend="ddp", world_size=2, step=2)
    for index, label in enumerate(("single", "single:micro_batch_size=4,norm=fp32,backward=reordered")):
        folder = tmp_path / f"a-single-n1-r0-{index}"
        folder.mkdir()
        write_record(folder, make_record(label=label, run_id=label))
    losses = [*LOSSES[2:3], LOSSES[3] + 0.5]
    own = LoadedRun(path=tmp_path / "own" / "record.json", record=make_record(label="ddp"))

    def resumed(losses: list) -> LoadedRun:
        made = from_step(make_record(label="zero3", steps=make_steps([*LOSSES[:2], *losses])), 2)
        made = made.model_copy(update={"resumed": begun})
        return LoadedRun(path=tmp_path / "resumed" / "record.json", record=made)

    said: list[str] = []
    assert diagnosis.diagnose((resumed(list(LOSSES[2:])), own), said.append).clean
    parted = diagnosis.diagnose((resumed(losses), own), said.append)
    assert (parted.baseline, parted.parting_step, parted.verdict) == (own, 3, None)
    told = " ".join(parted.explanation)
    assert "loss differs first, in step 3" in told
    assert "suspect what it restored from its checkpoint of step 2" in told
    assert diagnosis.NOT_CONTINUED in parted.explanation
    assert said == []


def test_another_training_with_equal_figures_is_called_so_with_the_words_that_differ() -> None:
    part = ObservationPart(command=["torchrun", "train.py"], frameworks=[], base="ddp")
    steps = make_steps(changes={2: {"learning_rate": 1.0}})
    script = run(label="observed-ddp", job_id="another", steps=steps, observation=part)
    assert diagnosis.diagnose((run(label="ddp"), script), lambda _: None).outcome == diagnosis.OTHER_TRAINING
    plain = part.model_copy(update={"command": ["torchrun", "train.py", "--rate", "0.1"]})
    other = run(label="observed-ddp", job_id="another", observation=plain)
    found = diagnosis.diagnose((script, other), lambda _: None)
    (told,) = (text for text in found.explanation if text.startswith("commands differ: "))
    assert told.startswith("commands differ: --rate 0.1 in ")
    assert told.endswith(", nothing in the baseline")
    assert found.hypotheses == {}  # what was asked for differs


def verdict(gradients: dict | None, updates: dict) -> diagnosis.StepVerdict:
    compared = None if gradients is None else compare_tensors(SKETCH, gradients, LIMITS)
    return diagnosis.StepVerdict(step=1, gradients=compared, updates=compare_tensors(SKETCH, updates, LIMITS))


def said(
    gradients: dict | None,
    updates: dict,
    *,
    accumulation: int = 1,
    beyond: tuple[str, ...] = ("weights",),
    explained: bool = False,
) -> list[str]:
    world = make_record(label="ddp").world.model_copy(update={"accumulation_steps": accumulation})
    return list(diagnosis.sentences(verdict(gradients, updates), world, beyond=beyond, explained=explained))


EQUAL, ONE = scaled(1.0), scaled(3.0, "b")
TURNED = [1.0, *[1.0, 1.0] * 4]
"""As large as b, at a right angle to it."""


@pytest.mark.parametrize(
    ("gradients", "updates", "how", "at", "told"),
    [
        (scaled(2.0), EQUAL, {}, 0, "all gradients x 2.000: summed over 2 ranks instead of averaged"),
        (scaled(0.25), EQUAL, {"accumulation": 4}, 0, "x 0.25: divided by the 4 accumulation steps again"),
        (scaled(1.37), EQUAL, {}, 0, "all gradients x 1.370"),
        (EQUAL, scaled(2.0), {}, 1, "all updates x 2.000"),
        (EQUAL, scaled(0.0), {}, 1, "updates: all are zero in the other run"),
        (ONE, EQUAL, {}, 0, "1 of 2 tensors differ: b x 3.000, off by 200 % (noise: 0.10 %)"),
        (scaled(-1.0), EQUAL, {}, 0, "all gradients x -1.000"),
        (scaled(-0.5, "b"), EQUAL, {}, 0, "1 of 2 tensors differ: b x -0.5, off by 150 % (noise: 0.10 %)"),
        (
            SKETCH | {"b": TURNED},
            EQUAL,
            {},
            0,
            "b in another direction, its size x 1.000, off by 140 %",
        ),
        ({"a": SKETCH["a"]}, EQUAL, {}, 0, "gradients: 1 of 2 tensors differ: b has none"),
        (EQUAL, ONE, {}, 2, "betas"),
        (EQUAL, ONE, {"explained": True}, -1, "updates: 1 of 2 tensors differ"),
        (None, EQUAL, {}, 0, "cannot gather"),
        (None, EQUAL, {"beyond": ("norm",)}, -1, "the gradient or its reported norm differs"),
        (
            EQUAL,
            EQUAL,
            {"beyond": ("loss",)},
            -1,
            "so both train equally, but one of them reports a wrong loss",
        ),
        (
            EQUAL,
            EQUAL,
            {"beyond": ("norm",)},
            -1,
            "so one of them reports a wrong gradient norm, or changes gradients after they were read",
        ),
        (EQUAL, EQUAL, {}, -1, "accumulates"),
    ],
)
def test_the_tensors_of_a_step_in_words(
    gradients: dict | None, updates: dict, how: dict, at: int, told: str
) -> None:
    assert told in said(gradients, updates, **how)[at]


def test_without_a_reference_a_factor_is_explained_on_either_side() -> None:
    world = make_record(label="ddp").world.model_copy(update={"accumulation_steps": 4})
    (told, *_) = diagnosis.sentences(
        verdict(scaled(4.0), scaled(1.0)), world, beyond=("norm",), explained=False, either=world
    )
    assert told == (
        "all gradients x 4.000: not divided by the 4 accumulation steps or those of the baseline divided by "
        "the 4 accumulation steps again"
    )


@pytest.mark.parametrize("losses", [True, False], ids=["loss divided twice", "losses not seen"])
def test_of_two_scripts_neither_is_said_to_be_wrong(losses: bool) -> None:
    """In both orders the same run is named for the same mistake."""

    def script(factor: float) -> Record:
        changes = {"loss": factor if losses else None, "gradient_norm": factor}
        part = ObservationPart(command=["python", "train.py"], frameworks=[])
        made = make_record(label="observed-ddp", steps=make_steps(changes=dict.fromkeys(range(4), changes)))
        return changed(made, observation=part, world={"accumulation_steps": 4})

    once, twice = (LoadedRun(path=Path(f"{n}.json"), record=script(n)) for n in (4.0, 1.0))
    what = "losses" if losses else "first gradient norm"
    for pair in ((once, twice), (twice, once)):
        first, second = (
            replace(run, place=place) for run, place in zip(pair, ("first", "second"), strict=True)
        )
        right, wrong = (first, second) if pair[0] is once else (second, first)
        said = "\n".join(diagnosis.diagnose((first, second), lambda _: None).explanation)
        again, never = "divided by the 4 accumulation steps again", "not divided by the 4 accumulation steps"
        assert re.search(f"if {re.escape(right.name)} is right: {what} x 0.25.*: {again}", said), said
        assert re.search(f"if {re.escape(wrong.name)} is right: {what} x 4.*: {never}", said), said


@pytest.mark.parametrize(("label", "told"), [("observed-ddp", True), ("observed-fsdp", False)])
def test_a_tensor_without_gradient_in_one_script_is_told_by_their_number(label: str, told: bool) -> None:
    one, two = (
        changed(make_record(label=name), observed=ObservedPart(updated_tensors=count))
        for name, count in (("observed-ddp", 5), (label, 4))
    )
    other = LoadedRun(path=Path("b.json"), record=two, place="second")
    said = " ".join(diagnosis.about_updated(one, two, other))
    assert (f"gradients of 4 tensors in {other.name}, 5 in the baseline" in said) is told


def test_what_reruns_do_not_reproduce_is_not_said_to_accumulate() -> None:
    parting = Parting(step=0, figure=NORM, baseline=1.0167, other=1.0020, difference=0.0147, noise=1e-6)
    last = list(
        diagnosis.sentences(
            verdict(scaled(1.0), scaled(1.0)), make_record(label="ddp").world, beyond=("weights",),
            explained=False, recorded=parting,
        )
    )[-1]  # fmt: skip
    assert last.startswith(
        "so the reruns lack what made the difference: the records differ in step 0 already, gradient norm "
        "1.0167 in the baseline, 1.002 in the other"
    )


def test_the_first_step_that_parts_is_taken() -> None:
    def run(*factors: float) -> dict[int, Examined]:
        return {
            step: Examined(gradients=scaled(f), updates=scaled(f), weight_norms={"a": 1.0, "b": 1.0})
            for step, f in enumerate(factors)
        }

    limits = dict.fromkeys(range(4), noise())
    parted = diagnosis.first_parting_step(run(1, 1, 1, 1), run(1, 1, 2, 3), limits)
    assert (parted.step, parted.parts, parted.updates.common_factor) == (2, True, pytest.approx(2.0))
    agreed = diagnosis.first_parting_step(run(1, 1), run(1, 1), limits)
    assert (agreed.step, agreed.parts) == (1, False)
