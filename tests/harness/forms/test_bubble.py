"""The bubble of a schedule, against the passes counted on a clock of equal ticks."""

import pytest

from harness.forms.pipeline import bubble_share


def ticks_of_gpipe(ranks: int, micro_batches: int) -> float:
    """Idle share of one pass: rank r works from tick r to r + m, and all wait for the last."""
    length = ranks - 1 + micro_batches
    return 1 - micro_batches / length


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 3)])
def test_it_is_the_idle_share_of_the_clock(ranks: int, micro_batches: int) -> None:
    expected = ticks_of_gpipe(ranks, micro_batches)
    assert bubble_share(ranks=ranks, micro_batches=micro_batches) == pytest.approx(expected)


def test_interleaving_divides_the_ratio_to_the_ideal_time() -> None:
    """Narayanan et al., section 2.2: (p - 1) / (v m)."""
    share = bubble_share(ranks=4, micro_batches=8, stages_per_rank=2)
    assert share / (1 - share) == pytest.approx(3 / 16)


def test_one_rank_has_no_bubble() -> None:
    assert bubble_share(ranks=1, micro_batches=4) == 0
