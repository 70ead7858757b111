"""Repeats: median, 95th percentile, intervals, and which differences are beyond noise.

Whole runs are compared, never the steps within a run: steps of one run share their machine, moment and
placement and would make noise look smaller than it is. Nothing here supposes how runs are distributed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, combinations, count
from math import comb, exp, inf, log, prod
from statistics import median, quantiles
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from harness.record import Record

LEVEL = 0.95
LEAST_FOR_P95 = 20
"""Of fewer values one lies beyond the 95th percentile at most, and it would be the largest in disguise."""
MOST_DIVISIONS = 20_000
"""Beyond these a fixed sample of divisions stands for all."""
SEED = 20260101

Significance = Literal["beyond noise", "within noise", "not judged"]
Stratum: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Runs of two cells that were made in one session."""


@dataclass(frozen=True)
class Interval:
    """Two bounds, both included."""

    low: float
    high: float


def percentile_95(values: Sequence[float]) -> float | None:
    """95th percentile, interpolated linearly; None of fewer than `LEAST_FOR_P95` values."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) >= LEAST_FOR_P95 else None


def value_range(values: Sequence[float]) -> Interval | None:
    return Interval(min(values), max(values)) if values else None


def shown_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the median, or the range where there are too few runs for one; None without values."""
    return median_interval(values) or value_range(values)


def median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_interval(values: Sequence[float]) -> Interval | None:
    """Interval that holds the true median at `LEVEL` or more; None below `interval_runs()` runs.

    Between order statistics, as the sign test gives it (Conover, Practical Nonparametric Statistics).
    """
    return _bounds(tuple(sorted(values))) if len(values) >= interval_runs() else None


@lru_cache(maxsize=1024)
def _bounds(values: tuple[float, ...]) -> Interval:
    out = _left_out(len(values))
    return Interval(values[out], values[-1 - out])


@lru_cache
def _left_out(runs: int) -> int:
    """How many values at each end lie outside of the interval; scipy.stats takes a second to import."""
    chances = accumulate(comb(runs, heads) / 2**runs for heads in range(runs))
    return next(out for out, chance in enumerate(chances) if chance > (1 - LEVEL) / 2) - 1


@lru_cache
def interval_runs() -> int:
    """The fewest runs whose range holds the true median at `LEVEL`: 6."""
    return next(runs for runs in count(1) if 2 / 2**runs <= 1 - LEVEL)


@lru_cache
def runs_to_judge(comparisons: int = 1) -> int:
    """The fewest runs of each of two cells that can show a difference among so many comparisons."""
    return next(runs for runs in count(1) if comparisons * 2 / comb(2 * runs, runs) <= 1 - LEVEL)


def walsh(values: Sequence[float]) -> tuple[float, Interval | None]:
    """The Hodges-Lehmann estimate of the middle and its interval; None below `interval_runs()` values.

    The estimate is the median of the means of all pairs (Walsh averages); the interval leaves out as many of
    them at each end as Wilcoxon's signed-rank test allows, exactly.
    """
    found = np.array(values, float)
    averages = np.sort(((found[:, None] + found) / 2)[np.tril_indices(len(found))])
    middle = float(np.median(averages))
    if len(found) < interval_runs():
        return middle, None
    chances = np.ones(1)
    for rank in range(1, len(found) + 1):
        chances = np.convolve(chances, [0.5, *[0.0] * (rank - 1), 0.5])
    out = int(np.count_nonzero(np.cumsum(chances) <= (1 - LEVEL) / 2)) - 1
    return middle, Interval(float(averages[out]), float(averages[-1 - out]))


def sign_flip_chances(differences: Sequence[Sequence[float]] | np.ndarray) -> list[float]:
    """For each column, how often chance alone makes a difference as clear as this one in any column.

    Rows are rounds; equal cells may swap within one, so all columns change sign together, round by round,
    which keeps what they share. Step-down max-T (Westfall and Young, 1993): a difference that is shown is
    left out for those less clear. A missing figure is zero.
    """
    table = np.asarray(differences, float)
    rounds, columns = table.shape
    scale = np.sqrt((table**2).sum(axis=0))
    table = table / np.where(scale > 0, scale, 1.0)
    if 2**rounds <= MOST_DIVISIONS:
        signs = 1.0 - 2.0 * ((np.arange(2**rounds)[:, None] >> np.arange(rounds)) & 1)
    else:
        drawn = np.random.default_rng(SEED).choice([-1.0, 1.0], (MOST_DIVISIONS - 1, rounds))
        signs = np.vstack([np.ones(rounds), drawn])
    clear = np.abs(signs @ table)
    order = np.argsort(-clear[0], kind="stable")
    chances = np.zeros(columns)
    largest = 0.0
    for place, column in enumerate(order):
        most = clear[:, order[place:]].max(axis=1)
        largest = max(largest, float(np.mean(most >= clear[0, column] - 1e-12)))
        chances[column] = largest
    return chances.tolist()


def stratified_significance(strata: Sequence[Stratum], comparisons: int = 1) -> Significance:
    """Whether two cells differ by more than chance makes of equal ones, compared within sessions only.

    Permutation test of the difference of means (Fisher, Pitman), with several sessions of the sum of what
    they differ in each (van Elteren's design). Exact but for the sample that stands for more than
    `MOST_DIVISIONS` divisions, two-sided, by Bonferroni over `comparisons`, so that all of them together
    raise a false alarm in at most 1 - `LEVEL` of cases. Not judged where no figures of so few runs could
    show a difference.
    """
    most = (1 - LEVEL) / comparisons
    divisions = prod(comb(len(values) + len(base), len(base)) for values, base in strata)
    if 2 / divisions > most:
        return "not judged"
    paired = [(tuple(values), tuple(base)) for values, base in strata if values and base]
    return "beyond noise" if chance(tuple(paired)) <= most else "within noise"


@lru_cache(maxsize=1024)
def chance(strata: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]) -> float:
    """The share of all divisions within each stratum that lie at least as far apart as the runs do."""
    pools = [np.array([*values, *base], float) for values, base in strata]
    pools = [pool - pool.mean() for pool in pools]
    sizes = [len(values) for values, _ in strata]
    rounding = 1e-12 * sum(float(np.abs(pool).sum()) for pool in pools)
    least = abs(sum(float(pool[:size].sum()) for pool, size in zip(pools, sizes, strict=True))) - rounding
    if prod(comb(len(pool), size) for pool, size in zip(pools, sizes, strict=True)) <= MOST_DIVISIONS:
        every = (
            np.array([sum(part) for part in combinations(pool.tolist(), size)])
            for pool, size in zip(pools, sizes, strict=True)
        )
        sums = reduce(lambda left, right: np.add.outer(left, right).ravel(), every)
        return float(np.mean(np.abs(sums) >= least))
    generator = np.random.default_rng(SEED)
    drawn = np.zeros(MOST_DIVISIONS)
    for pool, size in zip(pools, sizes, strict=True):
        shuffled = generator.permuted(np.tile(pool, (MOST_DIVISIONS, 1)), axis=1)
        drawn += shuffled[:, :size].sum(axis=1)
    return float((1 + np.count_nonzero(np.abs(drawn) >= least)) / (1 + MOST_DIVISIONS))


LEAST_STEPS = 8
"""Fewer do not tell noise from a trend."""
SAME_SHARE = 0.05
"""Steps within this share of the steady median are no warm-up, however quiet the rest is."""
NOISE_WIDTHS = 3.0
"""Steps within this many standard deviations are no warm-up either."""
DEVIATION_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
SETTLED_STEPS = 5
"""A step at the steady level, with most of so many from it on, ends the warm-up: later ones are none."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Where the steady state begins in a series, and its level."""

    first: int
    """Index into the series."""
    seconds: float
    """Median of what follows."""


def steady_state(seconds: Sequence[float]) -> SteadyState | None:
    """The steady part of a series; None: too short, or still changing after half of it."""
    if len(seconds) < LEAST_STEPS:
        return None
    smooth = running_median(seconds)
    level = float(np.median(seconds[mser(smooth) :]))
    band = max(SAME_SHARE * level, NOISE_WIDTHS * noise_seconds(seconds))
    settled = (np.abs(np.asarray(smooth) - level) <= band).tolist()
    half = len(seconds) // 2
    for first in range(half):
        following = settled[first : first + SETTLED_STEPS]
        if settled[first] and following.count(True) > SETTLED_STEPS / 2:
            return SteadyState(first=first, seconds=level)
    return None


def noise_seconds(seconds: Sequence[float]) -> float:
    """Standard deviation of single steps, from the median difference of neighbours.

    Differences leave a trend out, which would otherwise pass for noise (J. von Neumann et al., 'The mean
    square successive difference', Annals of Mathematical Statistics 12(2), 1941).
    """
    return DEVIATION_SCALE * float(np.median(np.abs(np.diff(seconds)))) / math.sqrt(2)


def running_median(values: Sequence[float]) -> list[float]:
    """Median of each value and its neighbours; the first stays, since a slow first step is a warm-up."""
    series = np.asarray(values)
    before, here, after = series[:-2], series[1:-1], series[2:]
    inner = np.maximum(np.minimum(before, here), np.minimum(np.maximum(before, here), after))
    return [values[0], *inner.tolist(), float(np.median(values[-SETTLED_STEPS:]))]


def mser(values: Sequence[float]) -> int:
    """Index in the first half before which the values are cut off; the earliest of equal ones.

    From the end on, the squared deviations of each rest follow from its sum and sum of squares. Values are
    taken relative to the last one, which keeps the two sums small compared with what they are subtracted for.
    """
    backwards = np.asarray(values)[::-1] - values[-1]
    counts = np.arange(1, len(values) + 1)
    spread = np.cumsum(backwards**2) - np.cumsum(backwards) ** 2 / counts
    errors = (np.maximum(spread, 0.0) / counts**2)[::-1]
    return int(errors[: len(values) // 2 + 1].argmin())


def uninstrumented_steps(record: Record) -> tuple[list[int], list[float]]:
    """Numbers and seconds of the warm-up and timed steps; the others carry probes."""
    steps = [step for step in record.steps if step.window in ("warmup", "timed")]
    return [step.step for step in steps], [step.seconds for step in steps]


def steady_from(record: Record) -> int | None:
    """Number of the first steady step of a run; None: too few steps, or there is none."""
    numbers, seconds = uninstrumented_steps(record)
    found = steady_state(seconds)
    return None if found is None else numbers[found.first]


EQUAL = 0.05
"""Cells are equal where the interval of their ratio lies within so much of 1."""
STOP = 0.01
"""The most chance at which no more rounds are needed: whoever looks ten times on the way to a hundred rounds
and stops at the first order takes chance for one in 5 % of cases (Pocock, 1977)."""
Order = Literal["faster", "slower", "equal", "open"]
Round: TypeAlias = tuple[int, ...]
"""Session first, then the number of the repeat."""
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
        return Ratio(
            rounds=self.rounds, middle=1 / self.middle if self.middle else None,
            extent=Interval(1 / self.extent.high, 1 / self.extent.low) if self.extent else None,
            order={"faster": "slower", "slower": "faster"}.get(self.order, self.order),  # type: ignore[arg-type]
            is_shown=self.is_shown, chance=self.chance,
        )  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One cell's run of a round."""

    value: float
    """Of which less is better: seconds of a step or token."""
    began: float | None = None
    """In seconds since 1970; None: unknown."""
    run_id: str = ""
    beside: Collection[str] | None = None
    """Run ids of the cells with which its timed steps were taken in turns; None: it ran whole."""


@dataclass(frozen=True)
class Ranking:
    """The order of some cells by speed, as far as their rounds support one; the fastest is first."""

    values: Mapping[str, Mapping[Round, Timed]]
    base: str
    """The cell that each of the others is compared with."""

    @cached_property
    def to_base(self) -> Mapping[str, Ratio]:
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
        known.sort(key=lambda pair: (-pair[1], median(run.value for run in self.values[pair[0]].values())))
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
        return self.names.index(left) < self.names.index(right) and self.ratio(left, right).order == "faster"

    @property
    def rounds(self) -> int:
        """Rounds that a cell shares with the base, of the cell that shares fewest."""
        return min((ratio.rounds for ratio in self.to_base.values()), default=0)

    @property
    def is_judged(self) -> bool:
        return any(ratio.extent is not None for ratio in self.to_base.values())

    @cached_property
    def leaders(self) -> tuple[str, ...]:
        """Names that none is ahead of: the best is among them."""
        return tuple(n for n in self.names if not any(self.is_ahead(other, n) for other in self.names))

    @cached_property
    def trailers(self) -> tuple[str, ...]:
        """Names that are ahead of none: the last is among them."""
        return tuple(n for n in self.names if not any(self.is_ahead(n, other) for other in self.names))

    def _family(self, pairs: Sequence[Pair]) -> dict[Pair, Ratio]:
        return ratios(
            {(one, other): shared_logs(self.values[one], self.values[other]) for one, other in pairs}
        )


def shared_logs(ours: Mapping[Round, Timed], theirs: Mapping[Round, Timed]) -> Logs:
    """The logarithm of the ratio of two speeds in each round in which both ran alike.

    Left out are rounds in which one took turns and the other none, or beside others: caches are colder then.
    So are those of whole runs between which another round lies: a cell that joins others later runs all of
    its rounds in one stretch, and what the machine does meanwhile is no difference of the cells.
    """
    both = {number: (run, theirs[number]) for number, run in ours.items() if number in theirs}
    logs = log_ratios({number: (left.value, right.value) for number, (left, right) in both.items()})
    began, alike = dict[Round, tuple[float | None, float | None]](), list[Round]()
    for number in logs:
        left, right = both[number]
        if left.beside is None and right.beside is None:
            began[number] = left.began, right.began
        elif right.run_id in (left.beside or ()) and left.run_id in (right.beside or ()):
            alike.append(number)
    alike += made_in_one_go(began)
    return {number: log for number, log in logs.items() if number in alike}


def made_in_one_go(began: Mapping[Round, tuple[float | None, float | None]]) -> list[Round]:
    """Rounds whose two runs have no run of another round begin between them; one of unknown time stays.

    Of rounds that overlap the one that was complete first stays.
    """
    known = {
        number: (one, two) for number, (one, two) in began.items() if one is not None and two is not None
    }
    found = [number for number in began if number not in known]
    spans = [(max(times), min(times), number) for number, times in known.items()]
    ended = -inf
    for last, first, number in sorted(spans):
        if first >= ended:
            found.append(number)
            ended = last
    return found


def ratios(asked: Mapping[Key, Logs]) -> dict[Key, Ratio]:
    """Ratios of speeds of which these are the logarithms: answered together, at `LEVEL` for all."""
    rounds = sorted({number for of_pair in asked.values() for number in of_pair})
    if not rounds:
        return {key: Ratio(rounds=0) for key in asked}
    table = np.array([[of_pair.get(number, 0.0) for of_pair in asked.values()] for number in rounds])
    chances = sign_flip_chances(table) if len(rounds) >= interval_runs() else [1.0] * len(asked)
    return {key: _ratio(asked[key], chance) for key, chance in zip(asked, chances, strict=True)}


def log_ratios(both: Mapping[Round, tuple[float, float]]) -> Logs:
    """Logarithms of the first's speed over the second's, of their seconds in rounds that both have."""
    return {n: log(right / left) for n, (left, right) in both.items() if 0 < left < inf and 0 < right < inf}


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
