import pytest

from harness.plan.fit import OutOfTrials, divisors, largest_fitting, largest_predicted, smaller_ones


def search(sizes, first: int, largest: int, estimate=lambda tried: None) -> tuple[int | None, list[int]]:
    """What was found, and the sizes that were tried for it."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    return largest_fitting(sizes, first, fits, lambda: estimate(tried)), tried


@pytest.mark.parametrize("sizes", [range(1, 101), [1, 2, 4, 8, 16, 32, 64], [5]])
@pytest.mark.parametrize("largest", [0, 1, 2, 5, 31, 32, 33, 99, 100, 1000])
@pytest.mark.parametrize("first", [1, 7, 50, 1000])
def test_the_largest_is_found_whatever_the_guess(sizes, largest: int, first: int) -> None:
    found, tried = search(sizes, first, largest)
    assert found == max((size for size in sizes if size <= largest), default=None)
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("wrong", [1, 90, 10**6, -5])
def test_wrong_estimates_cost_trials_but_no_answer(wrong: int) -> None:
    found, tried = search(range(1, 1001), 500, 321, lambda _: wrong)
    assert found == 321
    assert len(tried) <= 40


def test_a_right_guess_costs_two_trials() -> None:
    assert search(range(1, 2**16), 40, 40) == (40, [40, 41])


def test_a_guess_that_is_some_percent_off_costs_few_trials() -> None:
    found, tried = search(range(1, 2**16), 1000, 970)
    assert found == 970
    assert len(tried) <= 8


def test_a_right_estimate_ends_the_search() -> None:
    found, tried = search(range(1, 2**16), 1000, 123, lambda tried: 123)
    assert found == 123
    # Down to something that fits, to the estimate, and to the size above it.
    assert len(tried) <= 7


def test_a_budget_ends_the_search() -> None:
    def fits(_: int) -> bool:
        raise OutOfTrials

    with pytest.raises(OutOfTrials):
        largest_fitting([1, 2], 1, fits)


def test_the_largest_that_is_predicted_to_fit() -> None:
    assert largest_predicted(range(1, 100), lambda size: size <= 42) == 42
    assert largest_predicted([2, 4, 8], lambda size: size <= 5) == 4
    assert largest_predicted([2, 4, 8], lambda size: False) is None
    assert largest_predicted([2, 4, 8], lambda size: True) == 8
    asked: list[int] = []
    sizes = [2**n for n in range(10)]
    assert largest_predicted(sizes, lambda size: asked.append(size) or size <= 40, {32, 64}) == 32  # type: ignore[func-returns-value]
    assert min(asked) == 32


def test_smaller_ones_are_a_half_and_a_quarter_or_the_next_below() -> None:
    assert smaller_ones(range(1, 100), 40) == [20, 10]
    assert smaller_ones([1, 2, 3, 6, 12], 12) == [6, 3]
    assert smaller_ones([1, 3], 3) == [1]
    assert smaller_ones([7], 7) == []


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
