from typing import Any

import pytest

from harness.backends.mesh import Mesh
from harness.judge.explain import Explanation, explain, name_scale
from harness.judge.noise import Limits
from harness.record import RankPart
from tests.records import LOSSES, NORMS, make_ranks, make_record, make_steps, make_weights

LIMITS = Limits(loss=1e-4, norm=1e-4, update=1e-3, weights=1e-3, parameters={"a": 1e-3, "b": 1e-3})
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
    return explain(make_record(**start()), other.model_copy(update={"world": world}), LIMITS)


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
    found = explain(record, other, LIMITS)
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


def test_ranks_that_are_told_other_norms_clip_by_their_shard() -> None:
    found = explained(steps=make_steps(norms=(1.4, *NORMS[1:])), ranks=ranks(gradient_norms=[1.4, 1.5]))
    assert found.kind == "norm-of-shard"
    assert found.values["gradient_norms"] == [1.4, 1.5]


def test_a_gradient_of_no_known_scale_hints_at_what_the_job_allows() -> None:
    steps = make_steps(norms=(1.37, *NORMS[1:]))
    assert "a rank, a micro-step or a parameter may be missing" in explained(steps=steps).text
    uneven = explained(steps=steps, ranks=ranks(target_tokens=[216, 800]))
    assert uneven.kind == "gradient-differs"
    assert "averaged per rank instead of per token" in uneven.text


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


def test_a_run_that_parts_later_has_another_update() -> None:
    losses = [*LOSSES[:2], LOSSES[2] + 0.01, LOSSES[3] + 0.02]
    found = explained(steps=make_steps(losses), **start(b=2.5))
    assert found.kind == "update-differs"
    assert "losses diverge at step 2" in found.text
    assert found.values["parameters"] == ["b"]


def test_parameters_that_end_elsewhere_come_farthest_first() -> None:
    assert explained(**start(a=2.1, b=2.5)).values["parameters"] == ["b", "a"]


def test_a_run_in_which_nothing_moved_is_no_matter_of_single_parameters() -> None:
    assert explained(**start(a=1.0, b=1.0)).kind == "update-differs"
