from typing import Any

import pytest

from harness.compare.parity import Judgement, job_differences, judge
from harness.record import Record
from tests.records import LOSSES, NORMS, make_effective, make_record, make_steps, make_weights


def reference(**changes: Any) -> Record:
    return make_record(label="single", **changes)


def judged(**changes: Any) -> Judgement:
    return judge(reference(), make_record(label="ddp", **changes))


def shifted(loss: float = 0.0, norm_factor: float = 1.0) -> dict[str, Any]:
    """Steps beside the reference's, and other final weights."""
    steps = make_steps([value + loss for value in LOSSES], [value * norm_factor for value in NORMS])
    return {"steps": steps, "final_weights": make_weights("c" * 64)}


def in_precision(precision: str, **steps: float) -> Judgement:
    training = {"precision": precision}
    return judge(
        reference(training=training), make_record(label="ddp", training=training, **shifted(**steps))
    )


def test_equal_losses_norms_and_weights_are_exact() -> None:
    assert judged() == Judgement(parity="exact", loss_difference=0.0, norm_difference=0.0)


def test_reference_is_exact_beside_itself() -> None:
    assert judge(reference(), reference()).parity == "exact"


def test_equal_losses_with_other_final_weights_are_not_exact() -> None:
    assert judged(final_weights=make_weights("c" * 64)).parity == "tight"


def test_equal_losses_without_weight_digests_are_not_exact() -> None:
    judgement = judge(reference(final_weights=None), make_record(label="ddp", final_weights=None))
    assert judgement.parity == "tight"


@pytest.mark.parametrize("loss", [4e-5, -4e-5])
def test_rounding_is_tight(loss: float) -> None:
    judgement = judged(**shifted(loss))
    assert judgement.parity == "tight"
    assert judgement.loss_difference == pytest.approx(4e-5, rel=1e-6)


def test_more_than_rounding_has_diverged_in_fp32() -> None:
    assert judged(**shifted(6e-5)).parity == "diverged"


def test_without_clipping_less_counts_as_rounding() -> None:
    training = {"gradient_clipping": None}
    for loss, parity in ((4e-6, "tight"), (6e-6, "diverged")):
        other = make_record(label="ddp", training=training, **shifted(loss))
        assert judge(reference(training=training), other).parity == parity


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_low_precision_has_a_band(precision: str) -> None:
    assert in_precision(precision, loss=1e-2).parity == "band"
    assert in_precision(precision, loss=3e-2).parity == "diverged"
    assert in_precision(precision, loss=1e-5).parity == "tight"


def test_fp32_has_no_band() -> None:
    assert in_precision("fp32", loss=1e-2).parity == "diverged"


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.01])
def test_wrong_gradient_norm_with_the_same_loss_has_diverged(factor: float) -> None:
    judgement = judged(**shifted(norm_factor=factor))
    assert judgement.parity == "diverged"
    assert judgement.loss_difference == 0.0
    assert judgement.norm_difference == pytest.approx(abs(factor - 1))


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_wrong_gradient_norm_has_diverged_in_low_precision_too(factor: float) -> None:
    assert in_precision("bf16-mixed", norm_factor=factor).parity == "diverged"


def test_missing_gradient_norm_where_the_reference_has_one_has_diverged() -> None:
    steps = make_steps(LOSSES, (None, *NORMS[1:]))
    assert judged(steps=steps, final_weights=make_weights("c" * 64)).parity == "diverged"


def test_lost_loss_has_diverged() -> None:
    steps = make_steps((*LOSSES[:2], None, None), (*NORMS[:2], None, None))
    judgement = judged(status="diverged", steps=steps)
    assert judgement.parity == "diverged"
    assert judgement.loss_difference == 0.0


def unjudged(judgement: Judgement) -> str:
    assert judgement.parity == "unjudged"
    assert judgement.loss_difference is None
    assert judgement.norm_difference is None
    assert judgement.reason is not None
    return judgement.reason


def test_other_initial_weights_are_named() -> None:
    judgement = judged(initial_weights=make_weights("d" * 64))
    assert "initial weights" in unjudged(judgement)
    assert [d.field for d in judgement.not_same_job] == ["initial weights"]
    assert judgement.not_same_job[0].reference == "a" * 64
    assert judgement.not_same_job[0].given == "d" * 64


def test_other_parameter_count_is_named() -> None:
    weights = make_weights().model_copy(update={"parameter_count": 999})
    judgement = judged(initial_weights=weights)
    assert "parameter count is 999, the reference has 1000" in unjudged(judgement)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ledger", "f" * 16), ("samples", 7), ("target_tokens", 1000), ("learning_rate", 0.5)],
)
def test_other_samples_or_learning_rate_are_named_with_their_step(field: str, value: object) -> None:
    judgement = judged(steps=make_steps(changes={2: {field: value}, 3: {field: value}}))
    assert f"{field} of step 2" in unjudged(judgement)
    assert [d.field for d in judgement.not_same_job] == [f"{field} of step 2"]


def test_other_job_is_named() -> None:
    judgement = judged(job_id="b" * 12)
    assert "job_id is bbbbbbbbbbbb, the reference has 0123456789ab" in unjudged(judgement)


def test_other_number_of_steps_is_named() -> None:
    assert "number of steps is 3" in unjudged(judged(steps=make_steps(LOSSES[:3], NORMS[:3])))


def test_same_job_has_no_differences() -> None:
    assert job_differences(reference(), make_record(label="ddp")) == []


@pytest.mark.parametrize("dropout", [0.1, None])
def test_dropout_is_unjudged(dropout: float | None) -> None:
    model = {"dropout": dropout}
    judgement = judge(reference(model=model), make_record(label="ddp", model=model))
    assert "dropout" in unjudged(judgement)


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "unsupported"])
def test_run_without_result_is_unjudged(status: str) -> None:
    assert unjudged(judged(status=status)) == f"the run is {status}"


@pytest.mark.parametrize("other", [None, make_record(status="failed"), make_record(status="diverged")])
def test_without_a_reference_is_unjudged(other: Record | None) -> None:
    assert unjudged(judge(other, make_record(label="ddp"))) == "the reference has no result"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_clipping": None}, "gradient clipping in force"),
        ({"optimizer_groups": [{"betas": [0.9, 0.999], "eps": 1e-8}]}, "optimizer constants"),
    ],
)
def test_other_settings_in_force_are_not_the_same_job(changes: dict, named: str) -> None:
    record = make_record(label="ddp")
    backend = record.backend.model_copy(update={"effective": make_effective(**changes)})
    judgement = judge(reference(), record.model_copy(update={"backend": backend}))
    assert judgement.parity == "unjudged"
    assert [difference.field for difference in judgement.not_same_job] == [named]
