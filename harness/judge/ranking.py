"""Which cells may be put into an order: the one place that decides it for tables, sentences and pictures.

Two cells are ordered only if the test finds their difference beyond noise and no interval that is shown of
them contradicts it. All others are tied, or not judged where so few runs could show no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from statistics import median

from harness.judge.occasions import ByOccasion
from harness.judge.statistics import (
    Significance,
    Stratum,
    is_testable,
    pairs_among,
    runs_to_judge,
    shown_interval,
    stratified_significance,
)


@dataclass(frozen=True)
class Ranking:
    """The order of some cells by their figures, as far as their runs support one; the least is first."""

    values: Mapping[str, ByOccasion]
    """Figures of the runs of each cell by occasion, of which less is better: seconds of a step."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The cells by their medians: an order to list them in, which claims nothing."""
        known = [name for name, values in self.values.items() if any(values.values())]
        return tuple(sorted(known, key=self.median))

    def median(self, name: str) -> float:
        """Of all runs of a cell."""
        return median([value for values in self.values[name].values() for value in values])

    @property
    def comparisons(self) -> int:
        """How many pairs are compared: the best of the cells is sought, so every pair may be the one."""
        return pairs_among(len(self.names))

    @property
    def runs_needed(self) -> int:
        """The fewest runs of each cell, on one occasion, with which a difference can be shown."""
        return runs_to_judge(self.comparisons)

    @cached_property
    def judgements(self) -> Mapping[tuple[str, str], Significance]:
        """Every pair, the one of the smaller median first."""
        return {
            (left, right): difference(self.values[left], self.values[right], self.comparisons)
            for left, right in combinations(self.names, 2)
        }

    def judgement(self, left: str, right: str) -> Significance:
        """Whether two cells differ: a cell is tied with itself."""
        if left == right:
            return "within noise"
        return self.judgements.get((left, right)) or self.judgements[right, left]

    def is_ahead(self, left: str, right: str) -> bool:
        """Whether the first may be said to be better than the second."""
        return self.judgements.get((left, right)) == "beyond noise"

    @property
    def is_judged(self) -> bool:
        """Whether there were enough runs to test any pair."""
        return any(found != "not judged" for found in self.judgements.values())

    @cached_property
    def leaders(self) -> tuple[str, ...]:
        """Those that none is ahead of: the best is among them."""
        return tuple(n for n in self.names if not any(self.is_ahead(other, n) for other in self.names))

    @cached_property
    def trailers(self) -> tuple[str, ...]:
        """Those that are ahead of none: the last is among them."""
        return tuple(n for n in self.names if not any(self.is_ahead(n, other) for other in self.names))

    @cached_property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """The cells in groups, each cell of one ahead of every cell of all later groups.

        Within a group no order is claimed; one group: there is none at all.
        """
        cuts = [
            place
            for place in range(1, len(self.names))
            if all(self.is_ahead(left, r) for left in self.names[:place] for r in self.names[place:])
        ]
        return tuple(self.names[first:last] for first, last in pairwise([0, *cuts, len(self.names)]))


def ranking(values: Mapping[str, ByOccasion]) -> Ranking:
    """The order of cells by figures of their runs, of which less is better."""
    return Ranking(values)


def difference(values: ByOccasion, base: ByOccasion, comparisons: int = 1) -> Significance:
    """Whether two cells differ beyond noise, on the level that their occasions allow.

    Runs are compared within the occasions that both cells have: by the permutation test, and besides each
    shared occasion must order them alike. On a single occasion their intervals must not overlap. An order
    that the medians over all runs contradict is none.
    """
    strata = _shared(values, base)
    if not is_testable(strata, comparisons):
        return "not judged"
    signs = {_sign(median(left) - median(right)) for left, right in strata}
    signs.add(_sign(_overall(values) - _overall(base)))
    overlap = len(strata) == 1 and _overlap(*strata[0])
    if signs not in ({1}, {-1}) or overlap:
        return "within noise"
    return stratified_significance(strata, comparisons)


def significance_on_occasions(values: ByOccasion, base: ByOccasion, comparisons: int = 1) -> Significance:
    """What the test alone finds, within the occasions that both have."""
    return stratified_significance(_shared(values, base), comparisons)


def _shared(values: ByOccasion, base: ByOccasion) -> list[Stratum]:
    both = sorted(occasion for occasion in values if values[occasion] and base.get(occasion))
    return [(values[occasion], base[occasion]) for occasion in both]


def frontier(peaks: Mapping[str, float], order: Ranking) -> list[str]:
    """Cells in rising peak of memory, each beyond noise ahead of all before it: what more memory buys.

    The first needs least memory; of equal ones it is the one with the smaller median.
    """
    place = {name: number for number, name in enumerate(order.names)}
    found: list[str] = []
    for name in sorted((n for n in peaks if n in place), key=lambda n: (peaks[n], place[n])):
        if all(order.is_ahead(name, other) for other in found):
            found.append(name)
    return found


def _overlap(left: Sequence[float], right: Sequence[float]) -> bool:
    one, other = shown_interval(left), shown_interval(right)
    return one is None or other is None or (one.low <= other.high and other.low <= one.high)


def _overall(values: ByOccasion) -> float:
    return median([value for of_occasion in values.values() for value in of_occasion])


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
