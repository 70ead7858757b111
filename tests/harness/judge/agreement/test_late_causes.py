"""Causes are told by the figures of the step in which they begin."""

from dataclasses import replace
from typing import Any

import pytest

from harness.judge.agreement.divergence_causes import Explanation, explain_divergence
from harness.judge.agreement.job_equivalence import job_differences
from harness.judge.agreement.noise import measure_noise
from harness.record import ObservedPart, RankPart, Record
from tests.records import LOSSES, NORMS, make_ranks, make_record, make_steps, make_weights

TARGETS = 508.0


def ranks(own: list[tuple[float, ...]], **fields: Any) -> list[RankPart]:
    """Two ranks with these losses per target token, reported as computed but for `fields` of rank 1."""
    parts = []
    for rank, part in enumerate(make_ranks(2)):
        sums = [loss * TARGETS for loss in own[rank]]
        values = {"loss_sums": sums, "computed_loss_sums": sums, "target_tokens": [508] * 4}
        parts.append(part.model_copy(update=values | (fields if rank else {})))
    return parts


def explained(record: Record, **reference: Any) -> Explanation:
    single = make_record(**reference)
    return explain_divergence(single, record, measure_noise(single, ()).tight)


def test_a_gradient_that_is_wrong_from_a_later_step_on_is_no_update() -> None:
    norms = [*NORMS[:2], NORMS[2] * 0.7, NORMS[3] * 0.7]
    losses = [*LOSSES[:3], LOSSES[3] + 0.01]
    cause = explained(make_record(label="ddp", steps=make_steps(losses, norms)))
    assert cause.kind == "gradient-differs"
    assert "norm of step 2 is 0.7 times" in cause.text


def test_a_later_norm_that_differs_a_little_is_an_update() -> None:
    norms = [*NORMS[:2], NORMS[2] * 1.01, NORMS[3] * 1.02]
    cause = explained(make_record(label="ddp", steps=make_steps(LOSSES, norms)))
    assert cause.kind == "update-differs"
    assert "at step 2" in cause.text


def test_norms_that_part_bit_by_bit_are_an_update() -> None:
    reference = make_record(steps=make_steps(LOSSES, [5.0, 5.0, 5.0, 5.0]))
    drifting = make_record(label="ddp", steps=make_steps(LOSSES, [5.0, 5.1, 5.25, 5.4]))
    sudden = make_record(label="ddp", steps=make_steps(LOSSES, [5.0, 5.1, 5.4, 5.4]))
    limits = replace(measure_noise(reference, ()).tight, norm=0.04)
    assert explain_divergence(reference, drifting, limits).kind == "update-differs"
    assert explain_divergence(reference, sudden, limits).kind == "gradient-differs"


def test_gradients_that_are_summed_from_a_later_step_on_are_named() -> None:
    norms = [*NORMS[:2], NORMS[2] * 2, NORMS[3] * 2]
    cause = explained(make_record(label="ddp", steps=make_steps(LOSSES, norms)))
    assert cause.kind == "gradient-scale"
    assert "from step 2 on: summed over 2 ranks" in cause.text


@pytest.mark.parametrize("shown", ["nothing", "that of rank 0"])
def test_a_loss_of_rank_0_only_is_named_with_its_step(shown: str) -> None:
    own = [(5.6, 5.3, 5.1, 4.8), (5.4, 5.2, 4.9, 4.7)]
    late = [0.0, 0.0] if shown == "nothing" else [5.1 * TARGETS, 4.8 * TARGETS]
    reported = [5.4 * TARGETS, 5.2 * TARGETS, *late]
    losses = [*LOSSES[:2], *((2.55, 2.4) if shown == "nothing" else (5.1, 4.8))]
    parts = ranks(own, loss_sums=reported)
    cause = explained(make_record(label="ddp", steps=make_steps(losses), ranks=parts))
    assert cause.kind == "loss-of-one-rank"
    assert "from step 2 on" in cause.text


def test_a_loss_that_was_altered_after_it_was_computed_is_named() -> None:
    own = [(5.6, 5.3, 5.1, 4.8), (5.4, 5.2, 4.9, 4.7)]
    parts = ranks(own, loss_sums=[loss * TARGETS for loss in (5.0, 5.0, 5.0, 5.0)])
    losses = (5.3, 5.15, 5.05, 4.9)
    cause = explained(make_record(label="ddp", steps=make_steps(losses), ranks=parts))
    assert cause.kind == "loss-altered"


def moved(**sizes: float) -> dict[str, Any]:
    sketch = {name: [abs(size), *([size] * 8)] for name, size in sizes.items()}
    return {"final_weights": make_weights("c" * 64, sketch)}


START = {"initial_weights": make_weights(sketch={"a": [1.0] * 9, "b": [1.0] * 9})}


@pytest.mark.parametrize("held", [True, False])
def test_a_parameter_that_stands_still_lacks_a_gradient_only_if_an_optimizer_holds_it(held: bool) -> None:
    group = {"betas": [0.9, 0.95], "parameters": ["a", "b"] if held else ["a"]}
    seen = ObservedPart(optimizer_groups=[group], master_dtypes=["float32"])
    norms = [norm * 1.001 for norm in NORMS]
    record = make_record(
        label="ddp", steps=make_steps(LOSSES, norms), observed=seen, **START, **moved(a=3.0, b=1.0)
    )
    cause = explained(record, **START, **moved(a=3.0, b=2.0))
    assert cause.kind == ("gradient-differs" if held else "parameters-not-updated")
    assert cause.values["parameters"] == ["b"]


def test_ranks_with_other_weights_are_no_wrong_update() -> None:
    parts = [
        part.model_copy(update={"final_digest": digest * 64})
        for part, digest in zip(make_ranks(2), "bc", strict=True)
    ]
    losses = [*LOSSES[:2], LOSSES[2] + 0.01, LOSSES[3] + 0.02]
    cause = explained(make_record(label="ddp", steps=make_steps(losses), ranks=parts))
    assert (cause.kind, cause.text) == ("diverged", "ranks hold different weights")


def test_samples_that_differ_in_a_later_step_are_found() -> None:
    def hash_sums(*sums: list[str]) -> list[RankPart]:
        parts = zip(make_ranks(len(sums)), sums, strict=True)
        return [part.model_copy(update={"batch_hash_sums": own}) for part, own in parts]

    single = make_record(ranks=hash_sums(["03", "07", "0b", "0f"]))
    same = make_record(label="ddp", ranks=hash_sums(["01", "03", "05", "07"], ["02", "04", "06", "08"]))
    assert job_differences(single, same) == []
    late = make_record(label="ddp", ranks=hash_sums(["01", "03", "05", "07"], ["02", "04", "05", "07"]))
    (difference,) = job_differences(single, late)
    assert (difference.field, difference.kind) == ("samples of step 2", "samples-repeated")


def test_a_parameter_whose_gradients_have_a_factor_is_named_by_its_moments() -> None:
    norms = [1.1 * norm for norm in NORMS]
    moments = dict.fromkeys("abcdef", (1.0, 2.0))
    reference = make_record().model_copy(update={"moment_norms": moments})
    run = make_record(label="ddp", steps=make_steps(LOSSES, norms))
    run = run.model_copy(update={"moment_norms": moments | {"c": (0.5, 1.0)}})
    limits = measure_noise(reference, ()).tight
    cause = explain_divergence(reference, run, limits)
    assert cause.kind == "gradient-differs"
    assert "gradients of c are 0.5 times as large as in the reference, beside all others" in cause.text
    alike = run.model_copy(update={"moment_norms": dict.fromkeys(moments, (1.0, 2.2))})
    assert "as large as" not in explain_divergence(reference, alike, limits).text


def test_gradients_of_the_step_before_are_named() -> None:
    norms = [NORMS[0], NORMS[0], NORMS[1], NORMS[2]]
    cause = explained(make_record(label="ddp", steps=make_steps(LOSSES, norms)))
    assert cause.kind == "gradient-differs"
    assert cause.text.endswith("it is that of the step before: gradients come a step late")


def test_where_updates_are_adams_gradients_differ() -> None:
    norms = [*NORMS[:2], NORMS[2] * 1.01, NORMS[3] * 1.02]
    parts = [part.model_copy(update={"audited_updates": 3}) for part in make_ranks(2)]
    cause = explained(make_record(label="ddp", steps=make_steps(LOSSES, norms), ranks=parts))
    assert cause.kind == "gradient-differs"
    assert "every update that was looked at is what Adam makes of its gradient" in cause.text
    some = [parts[0], parts[1].model_copy(update={"audited_updates": 2})]
    cause = explained(make_record(label="ddp", steps=make_steps(LOSSES, norms), ranks=some))
    assert cause.kind == "update-differs"
