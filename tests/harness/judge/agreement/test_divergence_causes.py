import math
from dataclasses import replace
from typing import Any

import pytest

from harness.backends.mesh import Mesh
from harness.judge.agreement.divergence_causes import Explanation, explain_divergence, name_scale
from harness.judge.agreement.noise import Tolerance
from harness.record import LayoutPart, ObservedPart, RankPart, Record, ResumedPart, TensorPart
from tests.records import LOSSES, NORMS, make_ranks, make_record, make_steps, make_weights


def make_layout(names: list[str], **facts: list[str]) -> LayoutPart:
    tensors = [TensorPart(name=name, shape=[1], dtype="float32") for name in names]
    return LayoutPart(**{"parameters": tensors, "decaying": names, "buffers": [], "blocks": []} | facts)


LIMITS = Tolerance(loss=1e-4, norm=1e-4, update=1e-3, weights=1e-3, parameters={"a": 1e-3, "b": 1e-3})
TARGETS = 1016


def ranks(**per_rank: list[Any]) -> list[RankPart]:
    """Two ranks whose first step holds these values."""
    return [
        part.model_copy(update={name: [values[part.rank]] for name, values in per_rank.items()})
        for part in make_ranks(2)
    ]


def explained(accumulation_steps: int = 1, **changes: Any) -> Explanation:
    other = make_record(label="ddp", **changes)
    world = other.world.model_copy(update={"accumulation_steps": accumulation_steps})
    return explain_divergence(make_record(**start()), other.model_copy(update={"world": world}), LIMITS)


def weights(a: float, b: float) -> dict[str, list[float]]:
    """Sketches of two parameters of one element each."""
    return {"a": [abs(a), *[a] * 8], "b": [abs(b), *[b] * 8]}


def start(a: float = 2.0, b: float = 2.0) -> dict[str, Any]:
    """Weights that begin at 1 and end at these."""
    return {
        "initial_weights": make_weights(sketch=weights(1.0, 1.0)),
        "final_weights": make_weights("b" * 64, weights(a, b)),
    }


@pytest.mark.parametrize(
    ("ratio", "ranks", "steps", "told"),
    [
        (2.0, 2, 1, ["summed over 2 ranks instead of averaged"]),
        (0.25, 4, 1, ["divided by the 4 ranks again"]),
        (4.0, 2, 4, ["not divided by the 4 accumulation steps"]),
        (0.25, 2, 4, ["divided by the 4 accumulation steps again"]),
        (8.0, 2, 4, ["summed over 2 ranks and 4 accumulation steps"]),
        (0.125, 2, 4, ["divided by 2 ranks and 4 accumulation steps again"]),
        (2.004, 2, 1, ["summed over 2 ranks instead of averaged"]),
        (2.02, 2, 1, []),
        (3.0, 2, 4, []),
        (1.0, 1, 1, []),
    ],
)
def test_a_ratio_of_gradients_names_what_multiplied_them(
    ratio: float, ranks: int, steps: int, told: list[str]
) -> None:
    assert name_scale(ratio, Mesh.data_parallel(ranks), steps) == told


def test_a_factor_is_named_only_within_what_rounding_does_to_a_norm() -> None:
    """A rank that adds no gradient leaves a bit more or less than half of it."""
    half = explained(steps=make_steps(norms=[norm / 2 for norm in NORMS]))
    assert (half.kind, "divided by the 2 ranks again" in half.text) == ("gradient-scale", True)
    dropped = explained(steps=make_steps(norms=[norm / 2 * 1.001 for norm in NORMS]))
    assert dropped.kind == "gradient-differs"
    assert name_scale(0.5005, Mesh.data_parallel(2), 1, rounding=1e-2) == ["divided by the 2 ranks again"]


def test_a_reference_whose_loss_is_zero_has_no_ratio() -> None:
    zero = make_record(**start(), steps=make_steps([0.0, *LOSSES[1:]]))
    found = explain_divergence(zero, make_record(label="ddp", steps=make_steps([0.25, *LOSSES[1:]])), LIMITS)
    assert "the first loss differs (0.25 against 0)" in found.text


def test_a_ratio_that_ranks_and_steps_both_explain_names_both() -> None:
    assert len(name_scale(2.0, Mesh.data_parallel(2), 2)) == 2


def test_a_first_loss_that_is_not_finite_is_said() -> None:
    found = explained(steps=make_steps((None, *LOSSES[1:])))
    assert (found.kind, "not finite" in found.text) == ("diverged", True)


def test_a_loss_of_rank_0_alone() -> None:
    steps = make_steps([LOSSES[0] / 2, *LOSSES[1:]])
    found = explained(steps=steps, ranks=ranks(loss_sums=[2800.0, 0.0], target_tokens=[508, 508]))
    assert found.kind == "loss-of-one-rank"
    assert found.values["loss_sums"] == [2800.0, 0.0]


def test_a_mean_of_means_over_ranks_with_unequal_targets() -> None:
    """Sums that were each divided by the rank's own targets, then scaled as the loop scales them."""
    targets, true = [216, 800], [1200.0, 4388.0]
    wrong = [total * TARGETS / (len(targets) * count) for total, count in zip(true, targets, strict=True)]
    record = make_record(**start(), steps=make_steps([sum(true) / TARGETS, *LOSSES[1:]]))
    steps = make_steps([sum(wrong) / TARGETS, *LOSSES[1:]])
    other = make_record(label="ddp", steps=steps, ranks=ranks(loss_sums=wrong, target_tokens=targets))
    found = explain_divergence(record, other, LIMITS)
    assert found.kind == "loss-normalisation"
    assert found.values["target_tokens"] == targets


def test_a_loss_that_was_divided_before_it_was_reported() -> None:
    found = explained(4, steps=make_steps([LOSSES[0] / 4, *LOSSES[1:]]))
    assert found.kind == "loss-scale"
    assert "divided by the 4 accumulation steps again" in found.text


def test_another_first_loss_is_the_forward_pass() -> None:
    found = explained(steps=make_steps([LOSSES[0] + 0.01, *LOSSES[1:]]))
    assert found.kind == "diverged"
    assert "forward pass" in found.text
    assert found.values == {"reference": LOSSES[0], "given": LOSSES[0] + 0.01}


def test_a_gradient_that_was_summed() -> None:
    found = explained(steps=make_steps(norms=[2 * norm for norm in NORMS]))
    assert found.kind == "gradient-scale"
    assert "x 2: summed over 2 ranks" in found.text
    assert found.values == {"ratio": 2.0}


def test_ranks_whose_norms_are_parts_of_the_references_clip_by_their_shard() -> None:
    parts = [0.6 * NORMS[0], 0.8 * NORMS[0]]
    found = explained(steps=make_steps(norms=(parts[0], *NORMS[1:])), ranks=ranks(gradient_norms=parts))
    assert found.kind == "norm-of-shard"
    assert found.values["gradient_norms"] == parts
    ranks_of_hybrid = [
        part.model_copy(update={"gradient_norms": [parts[part.rank % 2]]}) for part in make_ranks(4)
    ]
    hybrid = explained(steps=make_steps(norms=(parts[0], *NORMS[1:])), ranks=ranks_of_hybrid)
    assert hybrid.kind == "norm-of-shard", "two replicas hold each shard"


def test_ranks_whose_norms_are_no_parts_of_it_do_not_reduce_gradients() -> None:
    found = explained(steps=make_steps(norms=(2.4, *NORMS[1:])), ranks=ranks(gradient_norms=[2.4, 2.5]))
    assert found.kind == "gradient-differs"
    assert "gradients are not reduced over ranks from the first step on, although weights end" in found.text
    assert found.values["gradient_norms"] == [2.4, 2.5]


def test_a_gradient_of_no_known_scale_hints_at_what_the_job_allows() -> None:
    steps = make_steps(norms=(1.37, *NORMS[1:]))
    assert "a rank, a micro-step or a parameter may be missing" in explained(steps=steps).text
    uneven = explained(steps=steps, ranks=ranks(target_tokens=[216, 800]))
    assert uneven.kind == "gradient-differs"
    assert "averaged per rank or micro-step instead of per token" in uneven.text


def test_a_norm_that_every_step_has_was_clipped_before_it_was_taken() -> None:
    steps = make_steps(norms=[0.3, 0.30001, 0.3, 0.3])
    told = explained(steps=steps).text
    assert told.endswith("; it is 0.3 in every step: gradients are clipped before their norm is taken")
    some = explained(steps=make_steps(norms=[0.3, 0.30001, 0.31, 0.3])).text
    assert "clipped" not in some
    level = make_record(**start(), steps=make_steps(norms=[0.5] * 4))
    alike = explain_divergence(level, make_record(label="ddp", steps=make_steps(norms=[0.4] * 4)), LIMITS)
    assert "clipped" not in alike.text, "the reference's do not differ either"


def test_a_factor_that_moves_no_weight_is_one_on_all_gradients() -> None:
    steps = make_steps(norms=[norm * 128 for norm in NORMS])
    told = "although the loss agrees; final weights agree: the norm is computed otherwise, or all gradients"
    assert told in explained(steps=steps, **start()).text
    assert "all gradients" not in explained(steps=steps, **start(a=2.1)).text
    assert "all gradients" not in explained(steps=steps).text, "weights that were not compared"


def test_a_parameter_that_ends_far_beyond_all_others_is_named() -> None:
    steps = make_steps(norms=[norm * 1.1 for norm in NORMS])
    told = "; b ends farthest from the reference's, by 40 % of its movement, any other by 10 % at most"
    assert explained(steps=steps, **start(a=2.1, b=2.4)).text.endswith(told)
    assert "farthest" not in explained(steps=steps, **start(a=2.15, b=2.4)).text


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (0.7, "be missing, or have a factor"),
        (1 - 1e-3, "be rounded or have a factor"),
        (1.2, "have a factor"),
    ],
)
def test_a_norm_says_no_more_than_its_size_allows(ratio: float, told: str) -> None:
    text = explained(steps=make_steps(norms=[norm * ratio for norm in NORMS])).text
    assert text.endswith(f"gradients of a rank, a micro-step or a parameter may {told}")


def test_what_alone_decays_is_named_as_that() -> None:
    def begin(a: float, b: float, c: float) -> dict[str, Any]:
        sketches = [
            {n: [v] * 9 for n, v in zip("abc", values, strict=True)} for values in ((1,) * 3, (a, b, c))
        ]
        return {
            "initial_weights": make_weights(sketch=sketches[0]),
            "final_weights": make_weights("b" * 64, sketches[1]),
        }

    limits = replace(LIMITS, parameters=dict.fromkeys("abc", 1e-3))
    reference = make_record(**begin(2.0, 2.0, 2.0), layout=make_layout(["a", "b"]))
    found = explain_divergence(reference, make_record(label="ddp", **begin(2.1, 2.1, 2.0)), limits)
    assert "the 2 parameters with weight decay, and no others, end with other values" in found.text
    found = explain_divergence(reference, make_record(label="ddp", **begin(2.1, 2.0, 2.1)), limits)
    assert "with weight decay" not in found.text


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1 - 8.6e-4, "the first gradient norm is 0.086 % below the reference's although"),
        (1 + 2.04e-3, "the first gradient norm is 0.20 % above the reference's although"),
        (0.7, "the first gradient norm is 0.7 times the reference's although"),
    ],
)
def test_a_gradient_norm_is_told_beside_the_references(ratio: float, told: str) -> None:
    assert told in explained(steps=make_steps(norms=(NORMS[0] * ratio, *NORMS[1:]))).text


def test_a_parameter_that_stood_still_is_named_before_the_gradient() -> None:
    found = explained(steps=make_steps(norms=(1.37, *NORMS[1:])), **start(b=1.0))
    assert found.kind == "parameters-not-updated"
    assert found.values == {"parameters": ["b"]}


@pytest.mark.parametrize(
    ("label", "apart", "kind"),
    [
        *((label, 0.5, "update-of-parts") for label in ("zero1", "zero3", "fsdp1")),
        *((label, 0.5, "update-differs") for label in ("fsdp1-no-shard", "ddp", "fsdp", "zero0")),
        *(("zero3", apart, "update-differs") for apart in (1e-6, None)),
    ],
)
def test_an_optimizer_that_looks_at_shapes_updates_flat_parts_otherwise(
    label: str, apart: float | None, kind: str
) -> None:
    losses = [*LOSSES[:2], LOSSES[2] + 0.01, LOSSES[3] + 0.02]
    record = make_record(label=label, steps=make_steps(losses), update_of_part=apart, **start(b=2.5))
    found = explain_divergence(make_record(**start()), record, LIMITS)
    assert found.kind == kind
    told = (
        "depends on the shape or the norm of a parameter (half a matrix, flattened, moves otherwise by 50 %)"
    )
    assert (told in found.text) == (kind == "update-of-parts")


def test_a_run_that_parts_later_has_another_update() -> None:
    losses = [*LOSSES[:2], LOSSES[2] + 0.01, LOSSES[3] + 0.02]
    found = explained(steps=make_steps(losses), **start(b=2.5))
    assert found.kind == "update-differs"
    assert found.text == (
        "losses first differ at step 2 and b ends with other values, although losses and gradient norms "
        "agree in the 2 steps before: the update differs, or passes use other weights than it leaves"
    )
    assert found.values["parameters"] == ["b"]


def test_parameters_that_end_elsewhere_come_farthest_first() -> None:
    assert explained(**start(a=2.1, b=2.5)).values["parameters"] == ["b", "a"]


def test_a_run_in_which_nothing_moved_is_no_matter_of_single_parameters() -> None:
    found = explained(**start(a=1.0, b=1.0))
    assert (found.kind, found.text) == (
        "parameters-not-updated",
        "no parameter moved: the optimizer updates nothing",
    )


def test_a_larger_gradient_norm_misses_nothing() -> None:
    assert "missing" not in explained(steps=make_steps(norms=(2.6, *NORMS[1:]))).text
    assert "missing" in explained(steps=make_steps(norms=(1.37, *NORMS[1:]))).text


def test_norms_that_were_not_compared_do_not_agree() -> None:
    unknown = {"steps": make_steps(norms=[None] * 4)}
    reference, other = make_record(**start(), **unknown), make_record(label="ddp", **start(b=2.5), **unknown)
    assert explain_divergence(reference, other, LIMITS).text == (
        "b ends with other values although losses agree in all 4 steps; gradient norms were not compared: "
        "the update differs"
    )


def layout(**facts: list[str]) -> dict[str, Any]:
    return {"layout": make_layout(["a", "b"], **facts)}


def test_frozen_weights_that_moved_are_named() -> None:
    reference = make_record(**start(b=1.0), **layout(frozen=["b"]))
    norms = [norm * 1.1 for norm in NORMS]
    for steps in (make_steps(), make_steps(norms=norms)):
        found = explain_divergence(reference, make_record(label="ddp", steps=steps, **start(b=1.5)), LIMITS)
        assert (found.kind, found.values) == ("frozen-weights-moved", {"parameters": ["b"]})


def test_decay_of_what_no_gradient_reaches_is_told_by_how_far_it_moves_the_weights() -> None:
    reference = make_record(**start(b=1.0), **layout(unreached=["b"]))
    other = make_record(label="zero2", **start())
    left = math.prod(1 - step.learning_rate * 0.1 for step in other.steps)
    for final, told in ((left, "; it shrinks by 0.021 %, the product of"), (0.5, "skipped in the reference")):
        found = explain_divergence(reference, make_record(label="zero2", **start(b=final)), LIMITS)
        assert found.kind == "decay-without-gradient"
        assert found.text.startswith("no gradient reaches b: zeros with weight decay here, skipped")
        assert told in found.text
        assert found.values["kept"] == {"b": pytest.approx(final)}


def test_an_expert_that_idles_in_a_step_of_the_reference_is_named_where_gradients_are_flat() -> None:
    def begin(**last: float) -> dict[str, Any]:
        sketches = {f"{name}.w": [value] * 9 for name, value in ({"a": 2.0, "b": 2.0} | last).items()}
        initial = {name: [1.0] * 9 for name in sketches}
        return {
            "initial_weights": make_weights(sketch=initial), "final_weights": make_weights("b" * 64, sketches)
        }  # fmt: skip

    idle = [
        part.model_copy(update={"without_gradient": {0: [], 2: ["b.w"], 3: []}}) for part in make_ranks(1)
    ]
    reference = make_record(ranks=idle, **begin())
    limits = replace(LIMITS, parameters={"a.w": 1e-3, "b.w": 1e-3})
    kinds = {
        label: explain_divergence(reference, make_record(label=label, **begin(b=2.5)), limits)
        for label in ("fsdp1", "zero2", "fsdp", "ddp")
    }
    assert [found.kind for found in kinds.values()] == [
        "decay-without-gradient", "decay-without-gradient", "update-differs", "update-differs"
    ]  # fmt: skip
    assert kinds["fsdp1"].text == (
        "no gradient reaches b.w in step 2: zeros here, an update by weight decay and moments; the reference "
        "skips it"
    )
    other = explain_divergence(reference, make_record(label="fsdp1", **begin(a=2.5)), limits)
    assert other.kind == "update-differs", "the expert is not what ends elsewhere"


def test_a_block_stands_for_its_parameters() -> None:
    names = ["layers.0.w", "layers.1.w", "layers.1.b"]
    begin = {name: [1.0] * 9 for name in names}
    moved = {name: [2.0] * 9 for name in names}
    initial = {"initial_weights": make_weights(sketch=begin)}
    reference = make_record(
        **initial, final_weights=make_weights("b" * 64, moved),
        layout=make_layout(names, blocks=["layers.0", "layers.1"]),
    )  # fmt: skip
    still = moved | {name: begin[name] for name in names[1:]}
    other = make_record(label="ddp", **initial, final_weights=make_weights("c" * 64, still))
    assert explain_divergence(reference, other, LIMITS).text.startswith("block layers.1 never moved")


def test_steps_of_a_resumed_run_have_their_own_numbers() -> None:
    steps = [replace(step, step=step.step + 5) for step in make_steps()]
    norms = [replace(step, gradient_norm=0.7 * norm) for step, norm in zip(steps, NORMS, strict=True)]
    resumed = ResumedPart(run_id="run", backend="ddp", world_size=2, step=5, format="neutral")
    other = make_record(label="ddp", steps=norms, resumed=resumed)
    found = explain_divergence(make_record(steps=steps), other, LIMITS)
    assert "gradient norm of step 5 is 0.7 times" in found.text
    assert found.values["step"] == 5
    update = make_record(label="ddp", steps=steps, resumed=resumed, **start(b=2.5))
    found = explain_divergence(make_record(steps=steps, **start()), update, LIMITS)
    assert "suspect what it restored from its checkpoint of step 5" in found.text


def with_buffers(record: Record, **digests: str) -> Record:
    return record.model_copy(update={"observed": ObservedPart(buffers=digests)})


def test_buffers_that_differ_before_the_first_step_are_named_in_place_of_the_update() -> None:
    reference = with_buffers(make_record(**start()), scale="1", other="2")
    apart = with_buffers(make_record(label="ddp", **start(b=2.5)), scale="3", other="2")
    alike = with_buffers(make_record(label="ddp", **start(b=2.5)), scale="1", other="2")
    told = "; buffer scale differs before the first step"
    assert told in explain_divergence(reference, apart, LIMITS).text
    assert ": the update differs" not in explain_divergence(reference, apart, LIMITS).text
    assert told not in explain_divergence(reference, alike, LIMITS).text
    steps = [replace(step, loss=6.0) for step in make_steps()]
    first = with_buffers(make_record(label="ddp", steps=steps, **start()), scale="3")
    assert told in explain_divergence(reference, first, LIMITS).text


@pytest.mark.parametrize(
    ("norm", "names", "kind"),
    [
        (NORMS[0], "bc", "parameters-not-updated"),
        (NORMS[0], "b", "gradient-differs"),
        (1.9, "bc", "gradient-differs"),
    ],
)
def test_weights_that_stand_still_lack_a_gradient_unless_its_norm_denies_it(
    norm: float, names: str, kind: str
) -> None:
    begin, moved = ({name: [value] * 9 for name in ("a", *names)} for value in (1.0, 2.0))
    initial = {"initial_weights": make_weights(sketch=begin)}
    groups = ObservedPart(optimizer_groups=[{"parameters": [*begin]}], master_dtypes=["float32"])
    steps = [replace(step, gradient_norm=norm) if step.step == 0 else step for step in make_steps()]
    still = make_weights("c" * 64, begin | {"a": moved["a"]})
    other = make_record(label="ddp", steps=steps, **initial, final_weights=still)
    reference = make_record(**initial, final_weights=make_weights("b" * 64, moved))
    assert explain_divergence(reference, other.model_copy(update={"observed": groups}), LIMITS).kind == kind
