import pytest

from harness.diagnose.diagnosis import StepVerdict, first_parting_step, number, sentences
from harness.diagnose.rerun import Examined, TensorComparison, compare_tensors
from tests.records import make_record

from .test_tensors import LIMITS, SKETCH, noise, scaled


def verdict(gradients: dict | None, updates: dict) -> StepVerdict:
    compared = None if gradients is None else compare_tensors(SKETCH, gradients, LIMITS)
    return StepVerdict(step=1, gradients=compared, updates=compare_tensors(SKETCH, updates, LIMITS))


def said(
    gradients: dict | None,
    updates: dict,
    *,
    accumulation: int = 1,
    beyond: tuple[str, ...] = ("weights",),
    explained: bool = False,
) -> list[str]:
    world = make_record(label="ddp").world.model_copy(update={"accumulation_steps": accumulation})
    return list(sentences(verdict(gradients, updates), world, beyond=beyond, explained=explained))


@pytest.mark.parametrize(
    ("factor", "accumulation", "named"),
    [
        (2.0, 1, "all gradients x 2.000: summed over 2 ranks instead of averaged"),
        (0.25, 4, "all gradients x 0.25: divided by the 4 accumulation steps again"),
        (1.37, 1, "all gradients x 1.370"),
    ],
)
def test_one_factor_over_all_gradients_is_named(factor: float, accumulation: int, named: str) -> None:
    assert said(scaled(factor), scaled(1.0), accumulation=accumulation)[0] == named


def test_a_factor_over_updates_is_not_taken_for_one_of_gradients() -> None:
    assert said(scaled(1.0), scaled(2.0))[1] == "all updates x 2.000"


def test_one_tensor_that_differs_is_named_with_its_ratio_and_noise() -> None:
    (gradients, *_) = said(scaled(3.0, "b"), scaled(1.0))
    assert gradients == ("gradients: 1 of 2 tensors differ: b x 3.000, off by 200 % (noise: 0.10 %)")


def test_a_parameter_without_gradient_is_named() -> None:
    assert said({"a": SKETCH["a"]}, scaled(1.0))[0] == "gradients: 1 of 2 tensors differ: b has none"


def test_updates_that_differ_after_equal_gradients_point_to_the_optimizer() -> None:
    assert "betas" in said(scaled(1.0), scaled(3.0, "b"))[2]
    assert len(said(scaled(1.0), scaled(3.0, "b"), explained=True)) == 2


def test_an_engine_that_cannot_gather_gradients_says_so() -> None:
    assert "cannot gather" in said(None, scaled(1.0))[0]


def test_without_gradients_a_norm_that_differs_is_not_called_a_wrong_report() -> None:
    last = said(None, scaled(1.0), beyond=("norm",))[-1]
    assert "the gradient or its reported norm differs" in last


@pytest.mark.parametrize(("beyond", "what"), [("loss", "loss"), ("norm", "gradient norm")])
def test_where_tensors_agree_only_the_report_is_wrong(beyond: str, what: str) -> None:
    last = said(scaled(1.0), scaled(1.0), beyond=(beyond,))[-1]
    assert last == f"so both train equally, but one of them reports a wrong {what}"


def test_weights_that_differ_without_a_step_that_does_add_up() -> None:
    assert "accumulates" in said(scaled(1.0), scaled(1.0))[-1]


def test_the_first_step_that_parts_is_taken() -> None:
    def run(*factors: float) -> dict[int, Examined]:
        return {
            step: Examined(gradients=scaled(f), updates=scaled(f), weight_norms={"a": 1.0, "b": 1.0})
            for step, f in enumerate(factors)
        }

    limits = dict.fromkeys(range(4), noise())
    parted = first_parting_step(run(1, 1, 1, 1), run(1, 1, 2, 3), limits)
    assert (parted.step, parted.parts, parted.updates.common_factor) == (2, True, pytest.approx(2.0))
    agreed = first_parting_step(run(1, 1), run(1, 1), limits)
    assert (agreed.step, agreed.parts) == (1, False)


def test_ratios_are_read_as_numbers() -> None:
    assert [number(value) for value in (2.0000001, 0.25, 0.3333333)] == ["2.000", "0.25", "0.3333"]


def test_all_tensors_zero_is_one_statement() -> None:
    nothing = scaled(0.0)
    found = compare_tensors(SKETCH, nothing, LIMITS)
    assert isinstance(found, TensorComparison)
    assert said(scaled(1.0), nothing)[1] == "updates: all are zero in the other run"
