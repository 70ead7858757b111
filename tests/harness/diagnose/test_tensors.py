import math

import pytest

from harness.diagnose.rerun import Examined, TensorNoise, compare_tensors
from harness.run_directory.events import ExaminedEvent

SKETCH = {"a": [2.0, *[2.0, -2.0] * 4], "b": [1.0, *[1.0, -1.0] * 4]}
LIMITS = dict.fromkeys(SKETCH, 1e-3)


def scaled(factor: float, names: str = "ab") -> dict[str, list[float]]:
    return {
        name: [value * (factor if name in names else 1.0) for value in values]
        for name, values in SKETCH.items()
    }


def examined(factor: float = 1.0) -> Examined:
    return Examined(
        gradients=scaled(factor), updates=scaled(factor), weight_norms=dict.fromkeys(SKETCH, 10.0)
    )


def noise(precision: str = "fp32", factor: float = 1.0, **repeats: list[Examined]) -> TensorNoise:
    kinds = {"splits": [], "others": []} | repeats
    return TensorNoise(reference=examined(), precision=precision, factor=factor, **kinds)


def test_equal_tensors_agree() -> None:
    found = compare_tensors(SKETCH, scaled(1.0), LIMITS)
    assert (found.beyond, found.common_factor, found.compared) == ((), None, 2)


def test_a_difference_within_its_limit_is_noise() -> None:
    assert not compare_tensors(SKETCH, scaled(1.0009), LIMITS).beyond
    assert compare_tensors(SKETCH, scaled(1.0011), LIMITS).beyond


def test_one_factor_over_all_tensors_is_recognised_within_noise() -> None:
    second = scaled(2.0)
    second["b"] = [value * 1.0005 for value in second["b"]]
    assert compare_tensors(SKETCH, second, LIMITS).common_factor == pytest.approx(2.0, rel=1e-3)


def test_a_factor_over_some_tensors_is_not_common() -> None:
    found = compare_tensors(SKETCH, scaled(3.0, "b"), LIMITS)
    assert found.common_factor is None
    assert [(t.name, t.ratio, t.difference) for t in found.beyond] == [("b", 3.0, pytest.approx(2.0))]


def test_a_tensor_that_is_missing_is_one_of_zeros() -> None:
    (missing,) = compare_tensors(SKETCH, {"a": SKETCH["a"]}, LIMITS).beyond
    assert (missing.name, missing.ratio) == ("b", 0.0)
    (extra,) = compare_tensors({"a": SKETCH["a"]}, SKETCH, LIMITS).beyond
    assert (extra.name, extra.ratio) == ("b", None)


def test_numbers_that_are_not_finite_part() -> None:
    sketches = {"a": [None] * 9}
    event = ExaminedEvent(step=0, gradients=sketches, updates=sketches, weight_norms={"a": None})
    read = Examined.read(event)
    assert read.gradients["a"][0] == math.inf
    found = compare_tensors({"a": SKETCH["a"]}, read.gradients, LIMITS)
    assert [t.name for t in found.beyond] == ["a"]
    assert found.common_factor is None


def test_limits_are_ten_times_how_far_another_split_lies() -> None:
    assert noise(splits=[examined(1.001)]).gradient_limits() == pytest.approx(dict.fromkeys("ab", 1e-2))


def test_at_low_precision_limits_are_three_times_how_far_other_precisions_lie() -> None:
    limits = noise("bf16-mixed", splits=[examined(1.0001)], others=[examined(1.1)]).gradient_limits()
    assert limits == pytest.approx(dict.fromkeys("ab", 0.3))


def test_between_two_runs_that_are_not_the_reference_noise_counts_twice() -> None:
    limits = noise(factor=2.0, splits=[examined(1.001)]).gradient_limits()
    assert limits == pytest.approx(dict.fromkeys("ab", 2e-2))


def test_an_update_is_rounded_to_the_spacing_of_its_weight() -> None:
    limits = noise(splits=[examined()]).update_limits()
    assert limits == pytest.approx({"a": 10 * 2.0**-23 * 5, "b": 10 * 2.0**-23 * 10})


def test_without_repetitions_the_lower_bound_is_that_of_the_precision() -> None:
    assert noise().gradient_limits()["a"] == pytest.approx(100 * 2.0**-23)
    assert noise("bf16-mixed").gradient_limits()["a"] == pytest.approx(3 * 2.0**-8)
