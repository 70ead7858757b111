import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.judge.agreement.causes import Pair, explain_divergence
from harness.judge.agreement.causes import shifted as name_shift
from harness.judge.agreement.parity import Judgement, Noise, measure_noise
from harness.judge.agreement.parity import judge as judge_run
from harness.judge.distance import movement
from harness.judge.quantities import Run
from harness.record import DimensionPart, Record, ResumedPart
from tests.records import (
    LOSSES,
    NORMS,
    changed,
    make_communication,
    make_effective,
    make_ranks,
    make_record,
    make_steps,
    make_weights,
)


def reference(**changes: Any) -> Record:
    return make_record(label="single", **changes)


def judge(reference: Record | None, record: Record, noise: Noise | None = None) -> Judgement:
    return judge_run(Run.of(reference) if reference else None, Run.of(record), noise)


def judged(**changes: Any) -> Judgement:
    return judge(reference(), make_record(label="ddp", **changes))


def shifted(loss: float = 0.0, norm_factor: float = 1.0) -> dict[str, Any]:
    """Steps beside the reference's, and other final weights."""
    steps = make_steps([value + loss for value in LOSSES], [value * norm_factor for value in NORMS])
    return {"steps": steps, "final_weights": make_weights("c" * 64)}


BF16 = {"precision": "bf16-mixed"}
OTHER_END = {"final_weights": make_weights("c" * 64)}


def normed(label: str, norms: Sequence[float], **how: Any) -> Record:
    """A run in bf16 whose losses are all alike."""
    return make_record(label=label, training=BF16, steps=make_steps([6.0] * len(norms), norms), **how)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"parity": "exact", "loss_difference": 0.0, "norm_difference": 0.0}),
        (OTHER_END, {"parity": "tight"}),
        *((shifted(loss), {"parity": "tight", "loss_difference": pytest.approx(4e-5, rel=1e-6),
                           "first_divergent_step": None}) for loss in (4e-5, -4e-5)),
        ({"steps": make_steps([*LOSSES[:2], LOSSES[2] + 1e-4, LOSSES[3] + 1e-3])} | OTHER_END,
         {"parity": "diverged", "first_divergent_step": 2}),
        *((shifted(norm_factor=factor),
           {"parity": "diverged", "loss_difference": 0.0, "first_divergent_step": 0,
            "norm_difference": pytest.approx(abs(factor - 1))}) for factor in (2.0, 0.5, 1.01)),
        ({"steps": make_steps(LOSSES, (None, *NORMS[1:]))} | OTHER_END, {"parity": "diverged"}),
        *(({"status": "diverged", "steps": make_steps((*LOSSES[:2], None, None), norms)},
           {"parity": "diverged", "loss_difference": 0.0}) for norms in (NORMS, (*NORMS[:2], None, None))),
    ],
)  # fmt: skip
def test_the_level_of_a_run_in_fp32(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    judgement = judged(**changes)
    assert {name: getattr(judgement, name) for name in expected} == expected


def test_weights_that_are_not_known_are_not_exact() -> None:
    unknown = make_record(label="ddp", final_weights=None)
    assert judge(reference(final_weights=None), unknown).parity == "tight"


def test_what_another_split_of_the_reference_changes_counts_as_rounding() -> None:
    split = make_record(label="single:micro_batch_size=4", **shifted(1e-5))
    noise = measure_noise(reference(), [split])
    for loss, parity in ((9e-5, "tight"), (1.1e-4, "diverged")):
        assert judge(reference(), make_record(label="ddp", **shifted(loss)), noise).parity == parity
    assert "single:micro_batch_size=4" in noise.derivation[0]


def test_a_plain_repeat_of_the_reference_does_not_measure_rounding() -> None:
    repeat = reference().model_copy(update={"repeat": 1})
    alone, beside_it = measure_noise(reference(), []), measure_noise(reference(), [repeat])
    assert beside_it.tight == alone.tight


def test_unmeasured_rounding_adds_up_over_the_steps() -> None:
    short, long = (
        measure_noise(reference(steps=make_steps([6.0] * count, [1.25] * count)), []).tight
        for count in (20, 300)
    )
    assert long.norm == pytest.approx(15 * short.norm)
    assert short.norm == measure_noise(reference(), []).tight.norm


def weights_that_moved(digest: str, **by_parameter: float) -> dict[str, Any]:
    sketch = {name: [abs(value), *([value] * 8)] for name, value in by_parameter.items()}
    return {"final_weights": make_weights(digest * 64, sketch)}


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_low_precision_has_a_band(precision: str) -> None:
    for loss, parity in ((5e-3, "band"), (7e-2, "diverged"), (5e-5, "tight")):
        training = {"training": {"precision": precision}}
        other = make_record(label="ddp", **training, **shifted(loss))
        assert judge(reference(**training), other).parity == parity


def test_the_band_is_what_the_precision_was_seen_to_change() -> None:
    """A loss in bf16 lies up to 2^-8 of it away, where only the repetition in fp32 came to a result."""
    single = reference(training=BF16)
    exact = make_record(label="single:precision=fp32", training=BF16, **shifted(1e-3))
    cast = make_record(label="single:precision=cast", training=BF16, **shifted(1e-3))
    failed, bound = cast.model_copy(update={"status": "failed"}), 5.5 * 2**-8
    for repeats, loss, parity in (
        ([cast], 2.9e-3, "band"), ([cast], 3.1e-3, "diverged"), ([exact, cast], bound, "diverged"),
        ([exact, failed], bound, "band"), ([exact, failed], 4 * bound, "diverged"),
    ):  # fmt: skip
        other = make_record(label="fsdp", training=BF16, **shifted(loss))
        assert judge(single, other, measure_noise(single, repeats)).parity == parity


def skipping(label: str, *without: int, norm: float = 1.0) -> Record:
    norms = [None if step in without else value * norm for step, value in enumerate(NORMS)]
    steps = {"steps": make_steps(LOSSES, norms), "skipped_steps": len(without)}
    return make_record(label=label, training={"precision": "fp16-mixed"}, **(shifted() | steps))


def test_a_repetition_that_skipped_other_steps_is_no_yardstick() -> None:
    single = skipping("single", 0)
    alike, other = (
        skipping("single:precision=cast", 0, norm=1.001),
        skipping("single:precision=fp32", norm=1.3),
    )
    noise = measure_noise(single, [alike, other])
    assert (noise.no_yardstick, noise.band and noise.band.norm) == (
        ("single:precision=fp32",),
        pytest.approx(0.003),
    )
    assert judge(single, skipping("ddp", 0, norm=1.002), noise).parity == "band"
    found = judge(single, skipping("ddp", 0, norm=1.01), noise)
    assert (found.parity, "skipped other steps" in (found.reason or "")) == ("unjudged", True)
    assert judge(single, skipping("ddp", 0, norm=0.6), noise).parity == "diverged", "a rank less does as much"


@pytest.mark.parametrize(("norm", "parity"), [(0.8, "band"), (0.6, "unjudged"), (0.1, "diverged")])
def test_no_repetition_lets_pass_what_a_rank_without_gradient_does(norm: float, parity: str) -> None:
    single, cast = skipping("single"), skipping("single:precision=cast", norm=1.25)
    noise = measure_noise(single, [cast])
    assert judge(single, skipping("ddp", norm=norm), noise).parity == parity
    alone = make_record(label="ddp", world_size=1, training={"precision": "fp16-mixed"},
                        **(shifted() | {"steps": skipping("ddp", norm=0.6).steps}))  # fmt: skip
    assert judge(single, alone, noise).parity == "band"


@pytest.mark.parametrize(("lost", "parity"), [((), "band"), ((10,), "unjudged"), (range(20), "diverged")])
def test_the_mean_of_norms_hides_no_rank_that_is_lost_in_some_steps(lost: Sequence[int], parity: str) -> None:
    """A repetition differs by 15 % in a step, so that 45 % are allowed: a rank of 4 changes 13.4 %."""
    apart = [1.0] * 4 + [0.85] + [1.0] * 15
    single, cast = normed("single", [1.0] * 20), normed("single:precision=cast", apart)
    split = normed("single:micro_batch_size=4", [1 + 1e-3 * math.cos(5 * step) for step in range(20)])
    given = [
        norm * (1 + 5e-3 * math.cos(3 * step)) * (0.86 if step in lost else 1.0)
        for step, norm in enumerate(apart)
    ]
    run = normed("zero3", given, world_size=4)
    judgement = judge(single, run, measure_noise(single, [cast, split]))
    assert judgement.parity == parity, judgement.reason


def test_a_limit_says_how_many_samples_it_hides() -> None:
    single, cast = skipping("single"), skipping("single:precision=cast", norm=1.25)
    derivation = measure_noise(single, [cast]).derivation
    assert derivation[-1].endswith(
        "a step may lack the gradient of 7 of 8 samples without its norm showing it"
    )
    assert "lack" not in derivation[0]


def test_the_first_step_of_a_run_that_continues_a_checkpoint_has_its_own_number() -> None:
    resumed = ResumedPart(run_id="run", backend="ddp", world_size=2, step=5, format="neutral")

    def later(record: Record) -> Record:
        steps = [replace(step, step=step.step + 5) for step in record.steps]
        return record.model_copy(update={"steps": steps, "resumed": resumed})

    for skipped, words in ((0, "skipped the first step"), (2, "skipped step 7; until then")):
        found = judge(later(skipping("single")), later(skipping("ddp", skipped)))
        assert (found.parity, words in (found.reason or "")) == ("unjudged", True)


@pytest.mark.parametrize(
    ("norms", "words"),
    [(NORMS, "the first loss and gradient norm agree"), ([None] * 4, "the first loss agrees")],
)
def test_of_a_job_that_communicates_itself_it_says_what_agrees(norms: list[float | None], words: str) -> None:
    own = [part.model_copy(update={"of_job": True, "phase": "forward"}) for part in make_communication(2)]
    steps = make_steps([*LOSSES[:3], LOSSES[3] + 1], norms)
    run = make_record(label="ddp", steps=steps, comm=own, final_weights=make_weights("c" * 64))
    found = judge(reference(steps=make_steps(norms=norms)), run)
    assert (found.parity, f": {words}, but" in (found.reason or "")) == ("unjudged", True), found


@pytest.mark.parametrize(
    ("norm", "given", "parity", "words"),
    [
        (1.0, (0, 2), "unjudged", "its own loss scaler alone skipped step 2; until then losses and gradient"),
        (1.0, (), "unjudged", "the reference's loss scaler alone skipped the first step"),
        (0.5, (0, 2), "diverged", ""),
    ],
)
def test_steps_after_one_that_a_loss_scaler_skipped_alone_are_not_compared(
    norm: float, given: tuple[int, ...], parity: str, words: str
) -> None:
    single = skipping("single", 0)
    noise = measure_noise(single, [skipping("single:precision=cast", 0, norm=1.001)])
    found = judge(single, skipping("ddp", *given, norm=norm), noise)
    assert (found.parity, words in (found.reason or "")) == (parity, True)


@pytest.mark.parametrize(("spacing", "parity"), [(0.125, "band"), (None, "diverged")])
def test_a_loss_that_is_computed_in_low_precision_has_the_spacing_of_its_value(
    spacing: float | None, parity: str
) -> None:
    """Near 20 nats: 0.125 in bf16, although no repetition rounds it."""
    exact = [20.06, 20.31, 19.44, 18.94]
    given = [20.125, 20.375, 19.5, 19.0] if spacing else [20.127, 20.376, 19.503, 19.004]
    sums = [[508 * loss for loss in given]] * 2
    ranks = make_ranks(2, computed_loss_sums=sums, target_tokens=[[508] * 4] * 2)
    single = reference(training=BF16, steps=make_steps(exact))
    noise = measure_noise(single, [
        make_record(label=f"single:{how}", training=BF16, steps=make_steps([x + 1e-3 for x in exact]))
        for how in ("micro_batch_size=4", "precision=fp32", "precision=cast")
    ])  # fmt: skip
    run = make_record(label="fsdp1", training=BF16, steps=make_steps(given), ranks=ranks)
    assert judge(single, run, noise).parity == parity


@pytest.mark.parametrize(
    ("factor", "parity"), [(0.995, "diverged"), (1.005, "diverged"), (1.0, "band"), (0.99998, "band")]
)
def test_a_factor_on_the_gradients_of_a_rank_does_not_hide_in_the_band(factor: float, parity: str) -> None:
    """Runs that round as `cast` does follow its norms, which leave the reference's by 0.6 %."""
    drift = [1.0, 0.997, 0.994, 1.001, 1.002, 0.996]
    single, cast = normed("single", [1.0] * 6), normed("single:precision=cast", drift)
    split = normed("single:micro_batch_size=4", [1.0, 1.0001, 0.9999, 1.0, 1.0001, 0.9999])
    noise = measure_noise(single, [cast, split])
    # Their mean is 0: the standard error of six values, four of them 0.01 % from it.
    assert noise.mean_norm == pytest.approx(1e-4 * (4 / 5 / 6) ** 0.5)
    other = normed("zero2", [norm * factor * (1 + n % 2 * 1e-5) for n, norm in enumerate(drift)])
    judgement = judge(single, other, noise)
    assert judgement.parity == parity
    assert [name for name, _, _ in judgement.exceeded] == ["mean_norm"] * (parity == "diverged")
    shift = noise.norm_shift(other)
    cause = explain_divergence(Pair(single, other, noise.widest(other), shift=shift))
    assert (shift is not None) is (cause.kind == "gradient-differs") is (parity == "diverged")
    if shift is not None:
        assert shift.label == "single:precision=cast"
        assert shift.allowed < 3 * noise.mean_norm, "less evenly apart are two orders of sums"
        assert shift.mean == pytest.approx(factor - 1, abs=1e-5)
    assert measure_noise(single, [cast]).norms == ()
    assert "norms" not in noise.as_json()


@pytest.mark.parametrize(
    ("moment", "parity"), [(0.76, "diverged"), (0.97, "band"), (5.0, "band")], ids=["c", "less", "rounded"]
)
def test_a_factor_on_one_parameter_does_not_hide_in_the_band(moment: float, parity: str) -> None:
    """Unless rounding makes its gradients, as those of a bias before a normalisation."""
    name = "noise" if moment == 5.0 else "c"

    def sized(label: str, loss: float = 0.0, **sizes: float) -> Record:
        sizes = dict.fromkeys(("a", "b", "c", "d", "noise"), 1.0) | sizes
        moments = {name: (1.0, size) for name, size in sizes.items()}
        return make_record(label=label, training=BF16, moment_norms=moments, **shifted(loss))

    single, cast = sized("single", b=1.002), sized("single:precision=cast", 1e-3, noise=3.0)
    noise, other = measure_noise(single, [cast]), sized("zero2", 2e-3, **{name: moment})
    found = judge(single, other, noise)
    assert found.parity == parity
    assert [name for name, _, _ in found.exceeded] == ["moment"] * (parity == "diverged")
    for repetitions in ([], [cast.model_copy(update={"moment_norms": {}})]):
        assert judge(single, other, measure_noise(single, repetitions)).parity == "band", "none measures it"
    assert "moments" not in noise.as_json()


def test_a_factor_is_told_by_steps_enough_and_from_the_first_alone() -> None:
    split = normed("single:micro_batch_size=4", [1.00001, 1.0, 1.0, 1.0])
    noise = measure_noise(normed("single", [1.0] * 4), [split])
    assert noise.norm_shift(normed("ddp", [0.995] * 3)) is None
    assert noise.norm_shift(normed("ddp", [1.0001, 0.995, 0.995, 0.995])) is None
    for dtype, factor, wire in (
        ("bfloat16", 0.995, True), ("bfloat16", 0.95, False), ("float32", 0.995, False),
    ):  # fmt: skip
        given = changed(normed("ddp", [factor] * 4), comm=[])
        given = changed(given, backend={"effective": make_effective(reduce_dtype=dtype)})
        text = name_shift(noise.norm_shift(given)) or ""
        assert "gradients of a rank, a micro-step or a parameter may have a factor" in text
        assert ("no repetition shows what their sums over ranks in bfloat16 may do, too" in text) is wire


def test_the_band_of_a_parameter_is_one_element_that_was_updated_the_other_way() -> None:
    start = {"initial_weights": make_weights(sketch={"a": [1.0] * 9, "b": [1.0] * 9})}
    single = reference(training=BF16, **start, **weights_that_moved("c", a=3.0, b=1.01))
    end = single.final_weights
    cast = make_record(label="single:precision=cast", training=BF16, **start, final_weights=end)
    noise = measure_noise(single, [cast])
    (moved,) = (distance for name, distance in movement(single).items() if name == "b")
    rate = max(step.learning_rate for step in single.steps)
    assert noise.band.parameters["b"] == pytest.approx(1.5 * 2 * rate / moved)
    for flipped, beyond in ((1, False), (2, True)):
        final = weights_that_moved("d", a=3.0, b=1.01 + flipped * 2 * rate)
        other = make_record(label="zero1", training=BF16, **start, **final)
        assert ("b" in [name for name, _, _ in judge(single, other, noise).exceeded]) is beyond


@pytest.mark.parametrize(("kind", "times"), [("adamw", 2.0), ("sgd", 1.0)])
def test_one_of_several_parameters_may_hold_the_whole_distance_that_adam_makes(
    kind: str, times: float
) -> None:
    """As its share of the elements makes likely: four that move alike, and one that hardly does."""
    start = {"initial_weights": make_weights(sketch={name: [1.0] * 9 for name in "abcde"})}
    ends = dict.fromkeys("abcd", 1e6) | {"e": 1e4}
    single = reference(**start, **weights_that_moved("c", **ends))
    moved = weights_that_moved("d", **ends | {"a": 1e6 + 20})
    split = make_record(label="single:micro_batch_size=4", **start, **moved)
    optimizer = single.job.optimizer.model_copy(update={"kind": kind})
    job = single.job.model_copy(update={"optimizer": optimizer})
    limits = measure_noise(changed(single, job=job), [split]).tight
    assert limits.parameters["b"] / limits.weights == pytest.approx(times, rel=1e-3)
    assert limits.parameters["e"] / limits.weights == pytest.approx(1.0)


def test_ranks_that_cut_layers_have_the_band_of_rounded_parts() -> None:
    single = reference(training=BF16)
    cast = make_record(label="single:precision=cast", training=BF16, **shifted(1e-3))
    parts = make_record(label="single:partial_sums=2", training=BF16, **shifted(2e-3))
    noise = measure_noise(single, [cast, parts])
    whole = make_record(label="ddp", training=BF16, **shifted(4e-3))
    tensor = {"dimensions": [DimensionPart(name="tensor", size=2)]}
    cut = changed(whole, world=tensor)
    assert judge(single, whole, noise).parity == "diverged"
    assert judge(single, cut, noise).parity == "band"
    assert judge(single, cut, measure_noise(single, [cast])).parity == "diverged"
    assert [level.name for level in noise.levels] == ["tight", "band", "band of cut layers"]
    assert noise.as_json()["cut_band"]["loss"] == pytest.approx(6e-3)
    assert "cut_band" not in measure_noise(single, [cast]).as_json()


def unjudged(judgement: Judgement) -> str:
    assert judgement.parity == "unjudged"
    assert judgement.loss_difference is None
    assert judgement.norm_difference is None
    assert judgement.reason is not None
    return judgement.reason


def test_other_initial_weights_are_named() -> None:
    judgement = judged(initial_weights=make_weights("d" * 64))
    assert "initial weights" in unjudged(judgement)
    (difference,) = judgement.not_same_job
    assert (difference.field, difference.reference, difference.given) == (
        "initial weights", "a" * 64, "d" * 64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"initial_weights": make_weights().model_copy(update={"parameter_count": 999})},
            "parameter count is 999, the reference has 1000",
        ),
        ({"job_id": "b" * 12}, "job_id is bbbbbbbbbbbb, the reference has 0123456789ab"),
        ({"steps": make_steps(LOSSES[:3], NORMS[:3])}, "number of steps is 3"),
        *(({"status": status}, f"the run ended as {status}")
          for status in ("failed", "oom", "timeout", "unsupported")),
    ],
)  # fmt: skip
def test_a_run_of_another_job_or_without_result_is_unjudged(changes: dict[str, Any], reason: str) -> None:
    assert reason in unjudged(judged(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_hashes", "f" * 16), ("samples", 7), ("target_tokens", 1000), ("learning_rate", 0.5),
        ("applied_learning_rate", 0.5),
    ],
)  # fmt: skip
def test_other_samples_or_learning_rate_are_named_with_their_step(field: str, value: object) -> None:
    judgement = judged(steps=make_steps(changes={2: {field: value}, 3: {field: value}}))
    named = "learning rate" if "learning_rate" in field else field
    assert f"{named} of step 2" in unjudged(judgement)
    assert [d.field for d in judgement.not_same_job] == [f"{named} of step 2"]


@pytest.mark.parametrize("dropout", [0.1, None])
def test_dropout_is_unjudged(dropout: float | None) -> None:
    model = {"dropout": dropout}
    judgement = judge(reference(model=model), make_record(label="ddp", model=model))
    assert "dropout" in unjudged(judgement)


def test_a_reference_that_was_refused_says_why() -> None:
    refused = make_record(status="unsupported", reasons=["cannot fit: 131 GB of 80 GB per rank"])
    reason = unjudged(judge(refused, make_record(label="ddp")))
    assert reason == "the reference has no result: cannot fit: 131 GB of 80 GB per rank"


@pytest.mark.parametrize("other", [None, make_record(status="failed"), make_record(status="diverged")])
def test_without_a_reference_is_unjudged(other: Record | None) -> None:
    assert unjudged(judge(other, make_record(label="ddp"))) == "the reference has no result"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_clipping": None}, "gradient clipping"),
        ({"optimizer_groups": [{"betas": [0.9, 0.999], "eps": 1e-8}]}, "optimizer constants"),
    ],
)
def test_other_settings_in_force_are_told_beside_the_level(changes: dict, named: str) -> None:
    judgement = judge(reference(), make_record(label="ddp", effective=changes))
    assert judgement.parity == "exact"
    assert [(s.setting, s.effect) for s in judgement.settings] == [(named, "mathematics")]
