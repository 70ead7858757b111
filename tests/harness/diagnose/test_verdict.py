import pytest

from harness.diagnose.verdict import conclude, step_to_examine
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

SKETCH = {"a": [2.0, *[2.0, -2.0] * 4], "b": [1.0, *[1.0, -1.0] * 4]}


def scaled(factor: float, names: str = "ab") -> dict:
    return {
        name: [value * (factor if name in names else 1.0) for value in values]
        for name, values in SKETCH.items()
    }


def said(gradients: dict | None, updates: dict, accumulation: int = 1) -> list[str]:
    first = {"gradients": SKETCH, "updates": SKETCH}
    return conclude(first, {"gradients": gradients, "updates": updates}, 2, accumulation, "fp32")


def test_equal_tensors_agree() -> None:
    assert said(scaled(1.0), scaled(1.0)) == ["gradients: all agree", "updates: all agree"]


@pytest.mark.parametrize(
    ("factor", "accumulation", "named"),
    [(2.0, 1, "x 2: summed over 2 ranks"), (0.25, 4, "x 0.25: divided by the 4 accumulation steps again")],
)
def test_one_factor_over_all_gradients_is_named(factor: float, accumulation: int, named: str) -> None:
    assert named in said(scaled(factor), scaled(1.0), accumulation)[0]


def test_one_tensor_that_differs_is_named_with_its_ratio() -> None:
    assert said(scaled(3.0, "b"), scaled(1.0))[0].startswith("gradients: 1 of 2 tensors differ: b (x 3,")


def test_updates_that_differ_after_equal_gradients_point_to_the_optimizer() -> None:
    assert "betas" in said(scaled(1.0), scaled(1.1))[2]


def test_an_engine_that_cannot_gather_gradients_says_so() -> None:
    assert "cannot gather" in said(None, scaled(1.0))[0]


def test_the_step_before_a_loss_that_differs_is_examined() -> None:
    losses = [*LOSSES[:2], LOSSES[2] + 1e-3, LOSSES[3]]
    assert step_to_examine(make_record(), make_record(label="ddp", steps=make_steps(losses))) == 1


def test_the_step_of_a_norm_that_differs_is_examined() -> None:
    norms = [*NORMS[:2], NORMS[2] * 2, NORMS[3]]
    assert step_to_examine(make_record(), make_record(label="ddp", steps=make_steps(norms=norms))) == 2


def test_other_final_weights_after_equal_steps_are_examined_from_the_start() -> None:
    other = make_record(label="ddp", final_weights=make_weights("c" * 64))
    assert step_to_examine(make_record(), other) == 0


def test_equal_runs_need_no_examination() -> None:
    assert step_to_examine(make_record(), make_record(label="ddp")) is None
