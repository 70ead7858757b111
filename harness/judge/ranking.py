"""Which cells may be put into an order: the one place that decides it for tables, sentences and pictures.

A round holds one run of every cell, made in one go, so cells are compared within rounds: by the ratio of
their mean steps in each, which is that of their throughputs. The questions are fixed
beforehand, each cell against the base of its place; pairs without the base are a family of their own, for
the sentences that need them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from math import exp, inf, log
from statistics import median
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from harness.judge.statistics import LEVEL, Interval, interval_runs, sign_flip_chances, walsh

EQUAL = 0.05
"""Cells are equal where the interval of their ratio lies within so much of 1."""
STOP = 0.01
"""The most chance at which no more rounds are needed: whoever looks ten times on the way to a hundred rounds
and stops at the first order takes chance for one in 5 % of cases (Pocock, 1977)."""
Order = Literal["faster", "slower", "equal", "open"]
Round: TypeAlias = tuple[int, ...]
"""Session first, then the number of the repeat."""
ByRound: TypeAlias = Mapping[Round, float]
"""A figure of one cell in each round, of which less is better: seconds of a step or token."""
Logs: TypeAlias = Mapping[Round, float]
"""The logarithm of a ratio of two speeds in each round that both sides have."""
Pair: TypeAlias = tuple[str, str]
Key = TypeVar("Key")
NO_FIGURES: Mapping[str, Any] = dict.fromkeys(
    ("speed_base", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_order")
)
"""Of a cell that is compared with no other."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The speed of one cell over that of another in the same rounds."""

    rounds: int
    middle: float | None = None
    """Hodges-Lehmann estimate; None: they share no round."""
    extent: Interval | None = None
    """At `LEVEL`, 1 included unless they are shown to differ; None: too few rounds for one."""
    order: Order = "open"
    is_shown: bool = False
    """Whether they differ, however little: also where the order is `equal`."""
    chance: float = 1.0
    """That equal cells would differ so much, for all questions of the family together."""

    def is_settled(self, precision: float | None) -> bool:
        """Whether more rounds are of no use: the order is found, and half the interval within `precision`."""
        if self.extent is None or not self.middle or self.order == "open":
            return False
        half = (self.extent.high - self.extent.low) / 2 / self.middle
        return (self.order == "equal" or self.chance <= STOP) and (precision is None or half <= precision)

    @property
    def mirrored(self) -> Ratio:
        """The second over the first."""
        return Ratio(
            rounds=self.rounds, middle=1 / self.middle if self.middle else None,
            extent=Interval(1 / self.extent.high, 1 / self.extent.low) if self.extent else None,
            order={"faster": "slower", "slower": "faster"}.get(self.order, self.order),  # type: ignore[arg-type]
            is_shown=self.is_shown, chance=self.chance,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """A run whose timed steps were taken in turns with those of other cells."""

    run_id: str
    beside: Collection[str]
    """Run ids of the other cells."""


@dataclass(frozen=True)
class Ranking:
    """The order of some cells by speed, as far as their rounds support one; the fastest is first."""

    values: Mapping[str, ByRound]
    base: str
    """The cell that each of the others is compared with."""
    turns: Mapping[str, Mapping[Round, InTurns]] = field(default_factory=dict)
    """Those rounds in which a cell took turns."""
    began: Mapping[str, ByRound] = field(default_factory=dict)
    """When the run of a round began, in seconds since 1970, where that is known."""

    @cached_property
    def to_base(self) -> Mapping[str, Ratio]:
        """Each other cell against the base."""
        found = self._family([(name, self.base) for name in self.values if name != self.base])
        return {name: ratio for (name, _), ratio in found.items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The cells by their ratio to the base: an order to list them in, which claims nothing.

        Without those that share no round with it, such as one that ran whole beside others in turns.
        """

        def ratio(name: str) -> float | None:
            return 1.0 if name == self.base else self.to_base[name].middle

        known = [(name, found) for name, of in self.values.items() if of and (found := ratio(name))]
        known.sort(key=lambda pair: (-pair[1], median(self.values[pair[0]].values())))
        return tuple(name for name, _ in known)

    @cached_property
    def _others(self) -> Mapping[Pair, Ratio]:
        return self._family(list(combinations([name for name in self.names if name != self.base], 2)))

    def ratio(self, left: str, right: str) -> Ratio:
        """The speed of the first over that of the second; a cell equals itself."""
        if left == right:
            return Ratio(rounds=len(self.values[left]), middle=1.0, extent=Interval(1.0, 1.0), order="equal")
        if right == self.base:
            return self.to_base[left]
        if left == self.base:
            return self.to_base[right].mirrored
        found = self._others.get((left, right))
        return found if found is not None else self._others[right, left].mirrored

    def figures(self, label: str) -> dict[str, Any]:
        """How a cell compares with the base, as programs read it; nothing where there is no other cell."""
        if len(self.names) < 2 or label not in self.names:
            return dict(NO_FIGURES)
        ratio = self.ratio(label, self.base)
        extent = ratio.extent
        found = (self.base, ratio.middle, extent and extent.low, extent and extent.high, ratio.order)
        return dict(zip(NO_FIGURES, found, strict=True))

    def is_ahead(self, left: str, right: str) -> bool:
        """Whether the first may be said to be faster than the second."""
        return self.names.index(left) < self.names.index(right) and self.ratio(left, right).order == "faster"

    @property
    def rounds(self) -> int:
        """Rounds that a cell shares with the base, of the cell that shares fewest."""
        return min((ratio.rounds for ratio in self.to_base.values()), default=0)

    @property
    def is_judged(self) -> bool:
        """Whether there were enough rounds to answer any question."""
        return any(ratio.extent is not None for ratio in self.to_base.values())

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

    def _family(self, pairs: Sequence[Pair]) -> dict[Pair, Ratio]:
        return ratios({pair: self.by_round(*pair) for pair in pairs})

    def by_round(self, left: str, right: str) -> Logs:
        """The logarithm of the ratio of two speeds in each round in which both ran alike.

        Left out are rounds in which one took turns and the other none, or beside others: caches are colder
        then. So are those of whole runs between which another round lies: a cell that joins others later runs
        all of its rounds in one stretch, and what the machine does meanwhile is no difference of the cells.
        """
        both = log_ratios(self.values[left], self.values[right])
        turns = [self.turns.get(name, {}) for name in (left, right)]
        whole = [number for number in both if not any(number in of for of in turns)]
        alike = made_in_one_go(whole, *(self.began.get(name, {}) for name in (left, right)))
        alike += [
            number
            for number in turns[0].keys() & turns[1].keys()
            if _are_together(*(of[number] for of in turns))
        ]
        return {number: both[number] for number in both if number in alike}


def made_in_one_go(rounds: Iterable[Round], ours: ByRound, theirs: ByRound) -> list[Round]:
    """Those between whose two runs none of another lies, by when they began; one of unknown time stays.

    Of rounds that overlap the one that was complete first stays.
    """
    found: list[Round] = []
    spans: list[tuple[float, float, Round]] = []
    for number in rounds:
        if number in ours and number in theirs:
            first, last = sorted((ours[number], theirs[number]))
            spans.append((last, first, number))
        else:
            found.append(number)
    ended = -inf
    for last, first, number in sorted(spans):
        if first >= ended:
            found.append(number)
            ended = last
    return found


def _are_together(ours: InTurns, theirs: InTurns) -> bool:
    return theirs.run_id in ours.beside and ours.run_id in theirs.beside


def ratios(asked: Mapping[Key, Logs]) -> dict[Key, Ratio]:
    """Ratios of speeds of which these are the logarithms: answered together, at `LEVEL` for all."""
    rounds = sorted({number for of_pair in asked.values() for number in of_pair})
    if not rounds:
        return {key: Ratio(rounds=0) for key in asked}
    table = np.array([[of_pair.get(number, 0.0) for of_pair in asked.values()] for number in rounds])
    chances = sign_flip_chances(table) if len(rounds) >= interval_runs() else [1.0] * len(asked)
    return {key: _ratio(asked[key], chance) for key, chance in zip(asked, chances, strict=True)}


def log_ratios(ours: ByRound, theirs: ByRound) -> Logs:
    """Of the speed of the first over that of the second in the rounds that both have."""
    both = [key for key in ours if 0 < ours[key] < inf and 0 < theirs.get(key, 0.0) < inf]
    return {key: log(theirs[key] / ours[key]) for key in both}


def _ratio(found: Logs, chance: float) -> Ratio:
    """An order must hold in each session by itself."""
    if not found:
        return Ratio(rounds=0)
    middle, extent = walsh(list(found.values()))
    if extent is None:
        return Ratio(rounds=len(found), middle=exp(middle))
    low, high = exp(extent.low), exp(extent.high)
    sessions = {key[0] for key in found}
    signs = {np.sign(median(v for key, v in found.items() if key[0] == number)) for number in sessions}
    is_shown = chance <= 1 - LEVEL and len(signs) == 1 and not low <= 1 <= high
    if not is_shown:  # the joint test does not exclude 1, so the interval must hold it
        low, high = min(low, 1.0), max(high, 1.0)
    order: Order = "open"
    if low >= 1 - EQUAL and high <= 1 + EQUAL:
        order = "equal"
    elif is_shown:
        order = "faster" if middle > 0 else "slower"
    return Ratio(
        rounds=len(found), middle=exp(middle), extent=Interval(low, high), order=order, is_shown=is_shown,
        chance=chance,
    )  # fmt: skip


def frontier(peaks: Mapping[str, float], order: Ranking) -> list[str]:
    """Cells in rising peak of memory, each faster than all before it: what more memory buys.

    The first needs least memory; of equal ones it is the one that is listed first.
    """
    place = {name: number for number, name in enumerate(order.names)}
    found: list[str] = []
    for name in sorted((n for n in peaks if n in place), key=lambda n: (peaks[n], place[n])):
        if all(order.is_ahead(name, other) for other in found):
            found.append(name)
    return found
