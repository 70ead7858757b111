"""Where step times become steady, on series of which it is known."""

import random

import pytest

from harness.judge.statistics import mser, running_median, steady_from, steady_state
from tests.records import make_record, make_steps


def noise(count: int, seed: int, spread: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [1.0 + draw.gauss(0, spread) for _ in range(count)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_noise_alone_is_steady_from_the_start(seed: int, spread: float) -> None:
    found = steady_state(noise(30, seed, spread))
    assert found is not None
    # The first step is not smoothed, so noise may cost that one.
    assert found.first <= 1
    assert found.seconds == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_slow_first_steps_are_warmup(seed: int) -> None:
    found = steady_state([3.0, 2.5, 2.0, 1.6, 1.4, *noise(25, seed)])
    assert found is not None
    assert found.first in (4, 5)


@pytest.mark.parametrize("seed", range(20))
def test_one_very_slow_first_step_is_warmup(seed: int) -> None:
    found = steady_state([20.0, *noise(19, seed)])
    assert found is not None
    assert found.first == 1


@pytest.mark.parametrize("place", [1, 4, 9, 15, 28, 29])
@pytest.mark.parametrize("seed", range(5))
def test_a_single_outlier_is_no_warmup(seed: int, place: int) -> None:
    series = noise(30, seed)
    series[place] = 8.0
    found = steady_state(series)
    assert found is not None
    assert found.first <= 1


def test_a_disturbance_after_a_steady_start_is_no_warmup() -> None:
    series = noise(30, 1)
    series[8:11] = [4.0, 4.0, 4.0]
    found = steady_state(series)
    assert found is not None
    assert found.first <= 1


def test_steps_that_keep_changing_have_no_steady_state() -> None:
    assert steady_state([3.0 - 0.1 * n for n in range(20)]) is None


def test_too_few_steps_are_not_judged() -> None:
    assert steady_state([1.0] * 7) is None


def test_mser_minimises_the_squared_standard_error_of_the_rest() -> None:
    values = [9.0, 5.0, 1.0, 1.1, 0.9, 1.0, 1.0, 1.1]
    assert mser(values) == 2


def test_running_median_keeps_the_first_value() -> None:
    assert running_median([9.0, 1.0, 1.0, 8.0, 1.0, 1.0, 7.0]) == [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_instrumented_steps_are_left_out() -> None:
    windows = ["warmup"] * 3 + ["probed"] * 2 + ["traced"] + ["cooldown"] * 2 + ["timed"] * 8
    seconds = [5.0, 1.0, 1.0, 9.0, 9.0, 9.0, 2.0, 2.0] + [1.0] * 8
    changes = {n: {"window": w, "seconds": s} for n, (w, s) in enumerate(zip(windows, seconds, strict=True))}
    steps = make_steps([5.0] * 16, [1.0] * 16, changes=changes)
    assert steady_from(make_record(steps=steps)) == 1
