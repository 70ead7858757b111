"""Finds the largest of some ascending sizes that fits, with few trials; knows nothing of runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

STRIDE = 32
"""The first step away from the first guess: this part of it. Predictions are right within some percent."""
GROWTH = 4
"""Each further step over the one before."""
MOST_ON_ONE_SIDE = 2
"""Estimates in a row; then the gap is halved once, should they be wrong."""
FRACTIONS = (2, 4)
"""Parts of the largest size that are tried as well: the largest is not always the fastest."""


class OutOfTrials(Exception):
    """The next trial would be one too many."""


def largest_fitting(
    sizes: Sequence[int],
    first: int,
    fits: Callable[[int], bool],
    estimate: Callable[[], int | None] = lambda: None,
) -> int | None:
    """The largest of `sizes` for which `fits` holds; None: not even the first.

    sizes: ascending; whatever is below one that fits fits too. first: the guess to begin with; a right one
    costs two trials. `estimate` says where the largest may be, from what was tried so far; None: it cannot.
    `fits` may raise OutOfTrials.
    """
    low, high = -1, len(sizes)  # fits, does not fit
    probe = min(max(_position(sizes, first), 0), high - 1)
    stride = max(1, probe // STRIDE)
    on_one_side = 0
    while high - low > 1:
        is_fitting = fits(sizes[probe])
        low, high = (probe, high) if is_fitting else (low, probe)
        guess = estimate() if low >= 0 and on_one_side < MOST_ON_ONE_SIDE else None
        if guess is not None:
            probe = _position(sizes, guess)
            on_one_side += 1
        elif low >= 0 and high < len(sizes):
            probe = (low + high) // 2
            on_one_side = 0
        else:
            probe = low + stride if is_fitting else high - stride
            stride *= GROWTH
            on_one_side = 0
        probe = min(max(probe, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _position(sizes: Sequence[int], size: int) -> int:
    """Index of the largest that is not above `size`; -1: there is none."""
    return bisect_right(sizes, size) - 1


def largest_predicted(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` that a prediction lets fit, by halving; None: not even the first.

    The last is asked first: as it leaves no accumulation, it may need less than smaller ones.
    """
    if fits(sizes[-1]):
        return sizes[-1]
    if not fits(sizes[0]):
        return None
    index = bisect_left(range(len(sizes)), True, key=lambda position: not fits(sizes[position]))
    return sizes[index - 1] if index else None


def smaller_ones(sizes: Sequence[int], largest: int) -> list[int]:
    """Sizes near fixed fractions of the largest, in falling order."""
    found = (sizes[max(0, _position(sizes, largest // part))] for part in FRACTIONS)
    return list(dict.fromkeys(size for size in found if size < largest))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})
