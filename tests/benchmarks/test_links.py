"""Step times over links of other speeds."""

import pytest

from benchmarks.links import crossover_bandwidth, seconds_over_link

FAST = 1e9
SMALL_BUT_SLOW, LARGE_BUT_QUICK = (0.2, 4e6), (0.1, 6e6)


def test_bytes_take_as_long_as_the_link_says() -> None:
    assert seconds_over_link(0.1, 5e6, FAST, 25e6) == pytest.approx(0.1 + 0.2 - 0.005)


def test_the_known_link_is_predicted_exactly() -> None:
    assert seconds_over_link(0.1, 5e6, FAST, FAST) == 0.1


def test_at_the_crossover_both_take_equally_long() -> None:
    bandwidth = crossover_bandwidth(SMALL_BUT_SLOW, LARGE_BUT_QUICK, FAST)
    assert bandwidth is not None
    times = [seconds_over_link(*each, FAST, bandwidth) for each in (SMALL_BUT_SLOW, LARGE_BUT_QUICK)]
    assert times[0] == pytest.approx(times[1])
    slower = [seconds_over_link(*each, FAST, bandwidth / 2) for each in (SMALL_BUT_SLOW, LARGE_BUT_QUICK)]
    assert slower[0] < slower[1]


@pytest.mark.parametrize("other", [(0.3, 6e6), (0.2, 5e6), (0.3, 4e6), SMALL_BUT_SLOW])
def test_one_that_is_never_behind_is_never_overtaken(other: tuple[float, float]) -> None:
    assert crossover_bandwidth(SMALL_BUT_SLOW, other, FAST) is None
