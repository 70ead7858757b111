"""Where step times become steady, on series of which it is known."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import comb
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy.stats import permutation_test, wilcoxon

from harness.judge.comparison import Comparison
from harness.judge.facts import SPEED, STEP
from harness.judge.rows import rank_speeds
from harness.judge.statistics import (
    EQUAL,
    LEVEL,
    Interval,
    Ranking,
    Round,
    Significance,
    Timed,
    chance,
    frontier,
    median_interval,
    runs_to_judge,
    shared_logs,
    sign_flip_chances,
    steady_from,
    steady_state,
    stratified_significance,
    value_range,
    walsh,
)
from harness.record import ErrorPart, Record, TurnsPart
from harness.tell.tables import ratio_cell, unranked_words
from tests.records import changed, make_record, make_steps
from tests.representatives import first

Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def significance(values: Sequence[float], base: Sequence[float], comparisons: int = 1) -> Significance:
    """Of two sets of runs of one session."""
    return stratified_significance([(values, base)], comparisons)


def chances(values: ArrayLike, base: ArrayLike) -> Floats:
    """By scipy: the share of all divisions of the runs into two such sets that are at least so far apart.

    `values` and `base` have a row per comparison and a column per run.
    """

    def far(left: Floats, right: Floats, axis: int) -> Floats:
        return np.asarray(np.abs(left.mean(axis=axis) - right.mean(axis=axis)))

    sides = np.asarray(values, float), np.asarray(base, float)
    test = permutation_test(sides, far, vectorized=True, axis=1, n_resamples=20_000, alternative="greater")
    return np.asarray(test.pvalue)


def test_an_interval_of_the_median_is_that_of_published_tables_and_begins_at_six_runs() -> None:
    """Conover, Practical Nonparametric Statistics: of 10 values the 2nd and 9th, of 20 the 6th and 15th."""
    assert [median_interval(range(1, last)) for last in (6, 7, 11, 21)] == [
        None, Interval(1, 6), Interval(2, 9), Interval(6, 15),
    ]  # fmt: skip
    assert (value_range([3.0, 1.0, 2.0]), value_range([])) == (Interval(1.0, 3.0), None)


@pytest.mark.parametrize(("cells", "runs"), [(2, 4), (2, 6), (3, 5), (5, 6), (5, 7)])
@pytest.mark.costly
def test_equal_cells_raise_a_false_alarm_in_at_most_one_of_twenty_comparisons(cells: int, runs: int) -> None:
    """The fastest is chosen after the fact, as the report does, and all others stand beside it."""
    generator = np.random.default_rng(11)
    tries = 1000
    drawn = generator.lognormal(0, 0.1, (tries, cells, runs))
    drawn = np.take_along_axis(drawn, np.argsort(np.median(drawn, axis=2))[:, :, np.newaxis], axis=1)
    others, fastest = drawn[:, :-1], np.repeat(drawn[:, -1:], cells - 1, axis=1)
    found = chances(others.reshape(-1, runs), fastest.reshape(-1, runs)).reshape(tries, cells - 1)
    least = (1 - LEVEL) / comb(cells, 2)
    alone = np.argwhere((found > least) & (found <= 1 - LEVEL))[:1]
    """Beyond noise if these were the only two cells."""
    for place, other in [(0, 0), *alone.tolist()]:
        judged = significance(others[place, other].tolist(), fastest[place, other].tolist(), comb(cells, 2))
        assert judged == ("beyond noise" if found[place, other] <= least else "within noise")
    alarms = np.count_nonzero(found.min(axis=1) <= least)
    assert alarms / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5


@pytest.mark.parametrize(("cells", "runs"), [(2, 4), (3, 5), (5, 6), (19, 8)])
def test_runs_that_are_apart_differ_once_there_are_enough(cells: int, runs: int) -> None:
    pairs = comb(cells, 2)
    slow, fast = [1.0 + 0.01 * n for n in range(runs)], [2.0 + 0.01 * n for n in range(runs)]
    assert runs_to_judge(pairs) == runs
    assert significance(slow, fast, pairs) == "beyond noise"
    assert significance(slow[1:], fast[1:], pairs) == "not judged"


def test_one_run_is_judged_against_many() -> None:
    others = [1.0 + 0.01 * number for number in range(39)]
    assert significance([9.0], others) == significance(others, [9.0]) == "beyond noise"
    assert significance([1.1], others) == "within noise"
    assert significance([9.0], others[1:]) == "not judged"


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_divisions_that_lie_equally_far_apart_count_whatever_their_rounding(offset: float) -> None:
    """Of the 20 divisions of 0 to 5, 2 are as far apart as 0, 1, 2 and 14 at least as far as 0, 4, 5."""
    low, high, mixed, others = (
        tuple(offset + 0.1 * number for number in of) for of in ((0, 1, 2), (3, 4, 5), (0, 4, 5), (1, 2, 3))
    )
    assert chance(((low, high),)) == pytest.approx(2 / 20)
    assert chance(((mixed, others),)) == pytest.approx(14 / 20)


def test_runs_of_several_sessions_are_exchanged_within_each() -> None:
    """Three days with a run of each: of eight ways two are as far apart, the one seen and its mirror."""
    days = [([1.0], [1.1]), ([5.0], [5.1]), ([9.0], [9.1])]
    assert chance(tuple((tuple(a), tuple(b)) for a, b in days)) == 2 / 8
    assert stratified_significance(days) == "not judged"
    assert stratified_significance([*days, *days]) == "beyond noise"
    assert stratified_significance([([1.0], []), ([], [2.0])]) == "not judged"


def test_a_sample_of_divisions_stands_for_very_many() -> None:
    day = tuple(float(n) for n in range(7)), tuple(n + 0.5 for n in range(7))
    assert 0.3 < chance((day, day)) < 0.9
    apart = tuple(float(n) for n in range(7)), tuple(n + 20.0 for n in range(7))
    assert chance((apart, apart)) < 1e-4


def test_walsh_averages_give_the_estimate_and_interval_of_published_tables() -> None:
    """Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, example 3.3 (nine patients)."""
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    middle, extent = walsh([y - x for x, y in zip(before, after, strict=True)])
    assert middle == pytest.approx(-0.46, abs=0.005)
    assert (extent.low, extent.high) == (pytest.approx(-0.786, abs=5e-4), pytest.approx(-0.010, abs=5e-4))
    assert walsh([1.0, 2.0, 3.0, 4.0, 9.0]) == (pytest.approx(3.0), None)


@pytest.mark.parametrize("rounds", [6, 7, 12, 25])
def test_the_interval_of_ratios_holds_what_the_signed_rank_test_does_not_reject(rounds: int) -> None:
    values = np.random.default_rng(rounds).lognormal(0, 1, rounds)
    _, extent = walsh(values.tolist())
    for bound, inside in ((extent.low, 1e-9), (extent.high, -1e-9)):
        assert wilcoxon(values - bound - inside, method="exact").pvalue > 1 - LEVEL
        assert wilcoxon(values - bound + inside, method="exact").pvalue <= 1 - LEVEL


def test_flips_of_whole_rounds_judge_all_questions_together() -> None:
    """Against a loop over all flips: step-down, the clearest first."""
    table = np.random.default_rng(2).normal([0.2, 0.3, 0.5], 1.0, (7, 3))
    scale = np.sqrt((table**2).sum(axis=0))
    seen = np.abs(table.sum(axis=0)) / scale
    flipped = [
        np.abs((np.array(of)[:, None] * table).sum(axis=0)) / scale for of in product((1, -1), repeat=7)
    ]
    expected, left, largest = dict.fromkeys(range(3), 0.0), [0, 1, 2], 0.0
    for column in sorted(range(3), key=lambda n: -seen[n]):
        largest = max(largest, float(np.mean([max(of[left]) >= seen[column] - 1e-12 for of in flipped])))
        expected[column] = largest
        left.remove(column)
    assert sign_flip_chances(table) == pytest.approx(list(expected.values()))


def test_one_question_is_the_sign_flip_test_of_scipy() -> None:
    for rounds in (7, 16):
        values = np.random.default_rng(rounds).normal(0.3, 1.0, rounds)
        every = 2**rounds + 1  # so many and scipy draws none
        by_scipy = permutation_test((values,), np.mean, permutation_type="samples", n_resamples=every)
        (found,) = sign_flip_chances(values[:, None])
        assert found == pytest.approx(by_scipy.pvalue, abs=0 if rounds == 7 else 0.02)


@pytest.mark.parametrize("rounds", first([6, 7], [6, 7, 15]))
def test_equal_cells_raise_a_false_alarm_in_at_most_one_of_twenty_tables(rounds: int) -> None:
    """Ten cells beside a base whose noise they share, heavy-tailed, with a machine that drifts."""
    generator = np.random.default_rng(rounds)
    alarms, tries = 0, 400
    for _ in range(tries):
        drift = np.linspace(0, generator.normal(), rounds)
        logs = generator.standard_t(2, (rounds, 11)) * 0.1 + drift[:, None]
        alarms += min(sign_flip_chances(logs[:, 1:] - logs[:, :1])) <= 1 - LEVEL
    assert alarms / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5


def noise(count: int, seed: int, spread: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [1.0 + draw.gauss(0, spread) for _ in range(count)]


def begins(series: Sequence[float]) -> int | None:
    found = steady_state(series)
    return None if found is None else found.first


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_noise_alone_is_steady_from_the_start(seed: int, spread: float) -> None:
    found = steady_state(noise(30, seed, spread))
    # The first step is not smoothed, so noise may cost that one.
    assert found.first <= 1
    assert found.seconds == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_slow_first_steps_are_warmup(seed: int) -> None:
    assert begins([3.0, 2.5, 2.0, 1.6, 1.4, *noise(25, seed)]) in (4, 5)
    assert begins([20.0, *noise(19, seed)]) == 1


@pytest.mark.parametrize("places", [[1], [4], [9], [15], [28], [29], [8, 9, 10]])
@pytest.mark.parametrize("seed", range(5))
def test_a_disturbance_is_no_warmup(seed: int, places: list[int]) -> None:
    series = noise(30, seed)
    for place in places:
        series[place] = 8.0 if len(places) == 1 else 4.0
    assert begins(series) in (0, 1)


def test_steps_that_keep_changing_and_too_few_have_no_steady_state() -> None:
    assert begins([3.0 - 0.1 * n for n in range(20)]) is None
    assert begins([1.0] * 7) is None


def test_instrumented_steps_are_left_out() -> None:
    windows = ["warmup"] * 3 + ["probed"] * 2 + ["traced"] + ["cooldown"] * 2 + ["timed"] * 8
    seconds = [5.0, 1.0, 1.0, 9.0, 9.0, 9.0, 2.0, 2.0] + [1.0] * 8
    changes = {n: {"window": w, "seconds": s} for n, (w, s) in enumerate(zip(windows, seconds, strict=True))}
    steps = make_steps([5.0] * 16, [1.0] * 16, changes=changes)
    assert steady_from(make_record(steps=steps)) == 1


DRIFT = [1.0, 1.3, 0.8, 2.0, 1.1, 3.0, 0.9]
"""Of a machine, over rounds: more than cells differ."""
NOISE = [1.0, 1.02, 0.99, 1.01, 0.98, 1.01, 1.0]


def rounds(seconds: float, noise: Sequence[float] = NOISE, shift: int = 0) -> dict[Round, Timed]:
    """Seconds of a cell on a machine that drifts; `shift` moves its own noise."""
    return {(0, n): Timed(seconds * drift * noise[(n + shift) % 7]) for n, drift in enumerate(DRIFT)}


def order_of(**cells: Mapping[Round, Timed]) -> Ranking:
    """The first is the base."""
    return Ranking(cells, next(iter(cells)))


UNLIKE = [1.0, 2.0, 0.5, 1.6, 0.6, 1.2, 0.8]
"""Noise that hides an order."""


def test_cells_are_compared_within_rounds() -> None:
    """The runs of both overlap by far; in each round one is ahead by a tenth."""
    order = order_of(ddp=rounds(1.0), fsdp=rounds(1.1, shift=3))
    ddp, fsdp = ([run.value for run in of.values()] for of in order.values.values())
    assert max(ddp) > 2 * min(fsdp)
    ratio = order.ratio("fsdp", "ddp")
    assert (ratio.order, ratio.rounds) == ("slower", 7)
    assert ratio.middle == pytest.approx(1 / 1.1, rel=0.02)
    assert ratio.extent.low < 1 / 1.1 < ratio.extent.high < 1
    assert order.ratio("ddp", "fsdp").order == "faster"
    assert (order.leaders, order.trailers) == (("ddp",), ("fsdp",))


@pytest.mark.parametrize(
    ("second", "third", "order", "ends", "cells"),
    [
        (rounds(1.001, shift=3), rounds(4.0, shift=1), "equal", (("ddp", "fsdp"), ("zero3",)), None),
        (rounds(1.3, UNLIKE), rounds(9.0), "open", None, [("1", False), ("~", False), ("0", True)]),
        (rounds(3.0, UNLIKE), rounds(3.5), "slower", (("ddp",), ("fsdp", "zero3")), None),
    ],
    ids=["close to one", "not settled", "several are slowest"],
)
def test_cells_that_the_rounds_do_not_tell_apart(
    second: Mapping[Round, Timed], third: Mapping[Round, Timed], order: str, ends: Any, cells: Any
) -> None:
    found = order_of(ddp=rounds(1.0), fsdp=second, zero3=third)
    assert found.ratio("fsdp", "ddp").order == order
    assert ends in (None, (found.leaders, found.trailers))
    shown = [ratio_cell(found, name) for name in ("ddp", "fsdp", "zero3")]
    assert cells in (None, [(cell.text[0], cell.is_strong) for cell in shown if cell])
    assert EQUAL == 0.05


def test_fewer_than_six_rounds_have_a_ratio_and_no_interval() -> None:
    few = {name: dict(list(of.items())[:5]) for name, of in (("a", rounds(1.0)), ("b", rounds(9.0)))}
    order = Ranking(few, "a")
    assert (order.is_judged, order.leaders) == (False, ("a", "b"))
    assert order.to_base["b"].middle == pytest.approx(1 / 9)
    assert order.to_base["b"].extent is None
    assert unranked_words(order) == "not ranked: 5 rounds; give --repeats 6"


def test_a_round_in_which_a_cell_has_no_figure_is_left_out_for_it_alone() -> None:
    lacking = {key: value for key, value in rounds(2.0).items() if key != (0, 3)}
    order = order_of(ddp=rounds(1.0), fsdp=lacking, zero3=rounds(3.0))
    assert [order.to_base[name].rounds for name in ("fsdp", "zero3")] == [6, 7]
    assert [order.to_base[name].order for name in ("fsdp", "zero3")] == ["slower", "slower"]


def test_a_cell_without_a_round_in_common_is_compared_with_nothing_and_not_called_slowest() -> None:
    apart = {(1, *key[1:]): value for key, value in rounds(9.0).items()}
    order = order_of(ddp=rounds(1.0), fsdp=apart)
    assert (order.ratio("fsdp", "ddp").middle, ratio_cell(order, "fsdp")) == (None, None)
    assert not order.is_judged
    assert order.figures("fsdp")["speed_base"] is None
    order = order_of(ddp=rounds(1.0), fsdp=apart, zero3=rounds(2.0))
    assert (order.names[-1], order.trailers) == ("zero3", ("zero3",))


def test_an_order_that_does_not_hold_in_each_session_is_none() -> None:
    other = {(1, 0): Timed(1.0)}
    ours, theirs = {**rounds(1.0), **other}, {**rounds(2.0), (1, 0): Timed(0.9)}
    assert order_of(ddp=ours, fsdp=theirs).ratio("fsdp", "ddp").order == "open"
    assert order_of(ddp=ours, fsdp={**theirs, (1, 0): Timed(2.1)}).ratio("fsdp", "ddp").order == "slower"


def test_memory_buys_speed_only_where_each_step_is_shown() -> None:
    order = order_of(
        lean=rounds(2.0), middle=rounds(1.5, UNLIKE), fat=rounds(1.0), fatter=rounds(0.999, shift=2)
    )
    peaks = {"lean": 1.0, "middle": 2.0, "fat": 3.0, "fatter": 4.0}
    assert frontier(peaks, order) == ["lean", "fat"]
    single = Ranking({name: {(0, 0): of[0, 0]} for name, of in order.values.items()}, "lean")
    assert frontier(peaks, single) == ["lean"]


RUN = st.builds(Timed, st.floats(0.01, 10.0))
CELL = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 7)), RUN, min_size=1)


@given(st.dictionaries(st.sampled_from("abcde"), CELL, min_size=1))
def test_no_order_goes_in_a_circle(values: dict[str, dict[Round, Timed]]) -> None:
    order = Ranking(values, next(iter(values)))
    compared = [name for name, of in values.items() if name == order.base or {*of} & {*values[order.base]}]
    assert sorted(order.names) == sorted(compared)
    assert order.leaders
    assert order.trailers


def runs_of(label: str, timed: Sequence[tuple[float, float]]) -> list[Record]:
    return [
        make_record(label=label, run_id=f"{label}-{n}", steps=make_steps(changes={
            2: {"seconds": first}, 3: {"seconds": second},
        }))
        for n, (first, second) in enumerate(timed)
    ]  # fmt: skip


def taking_turns(label: str, number: int, seconds: Sequence[float], beside: str) -> Record:
    """A run of two steps before its timed ones, which were taken in turns beside another cell."""
    steps = [0.5, 0.5, *seconds]
    return make_record(
        label=label, repeat=number, run_id=f"{label}-{number}",
        steps=make_steps(
            [5.0] * len(steps), [1.0] * len(steps),
            changes={n: {"seconds": value} for n, value in enumerate(steps)},
        ),
        turns=TurnsPart(
            steps=1, places=[], beside=[f"{beside}-{number}"], waited_seconds=1.0,
            waited_process_seconds=0.0,
        ),
    )  # fmt: skip


def neighboured(number: int, beside: str = "ddp") -> list[Record]:
    """FSDP takes a tenth longer than ddp. Steps differ in length, as those of texts do."""
    ddp = [DRIFT[number] * seconds for seconds in (1.0, 2.0, 1.5)]
    fsdp = [1.1 * seconds for seconds in ddp]
    return [taking_turns("ddp", number, ddp, "fsdp"), taking_turns("fsdp", number, fsdp, beside)]


def logs(order: Ranking) -> Mapping[Round, float]:
    return shared_logs(order.values["fsdp"], order.values["ddp"])


@pytest.mark.parametrize("key", [SPEED, STEP])
def test_cells_that_took_turns_are_compared_as_their_throughputs_are(key: str) -> None:
    """A table that holds tokens/s beside the ratio holds no contradiction."""
    groups = Comparison(record for n in range(7) for record in neighboured(n)).groups
    order, rates = rank_speeds(groups, key), rank_speeds(groups, SPEED).values
    assert logs(order) == {
        number: pytest.approx(math.log(run.value / rates["fsdp"][number].value))
        for number, run in rates["ddp"].items()
    }
    ratio = order.ratio("fsdp", "ddp")
    assert (ratio.rounds, ratio.order) == (7, "slower")
    assert ratio.extent == Interval(pytest.approx(1 / 1.1), pytest.approx(1 / 1.1))


def test_cells_that_did_not_run_alike_in_a_round_are_not_compared_in_it() -> None:
    """One of a round ran again later, beside other cells, or whole."""
    apart = Comparison(record for n in range(7) for record in neighboured(n, beside="zero3"))
    assert logs(rank_speeds(apart.groups)) == {}
    alike = [record for n in range(7) for record in neighboured(n)]
    mixed = [alike[0].model_copy(update={"turns": None}), *alike[1:]]
    order = rank_speeds(Comparison(mixed).groups)
    assert set(logs(order)) == {(0, n, 0) for n in range(1, 7)}


def in_stretches(*stretches: Sequence[str], slow: str = "") -> list[Record]:
    """Seven whole runs of each cell on a machine that is twice as slow in the second stretch.

    The cells of a stretch run in rounds; `slow` takes four times as long as the others.
    """
    found = []
    for part, labels in enumerate(stretches):
        for n in range(7):
            for place, label in enumerate(labels):
                seconds = (1 + part) * (4.0 if label == slow else 1.0) * NOISE[(n + place) % 7]
                minute = 30 * part + 3 * n + place
                at = f"2026-01-02T03:{minute:02}:00.000+00:00"
                steps = make_steps(seconds=seconds)
                found.append(
                    make_record(label=label, repeat=n, run_id=f"{label}-{n}", steps=steps, created_at=at)
                )
    return found


def test_a_cell_that_joins_later_shares_no_rounds_with_those_that_ran_before() -> None:
    """All of its runs met another machine than theirs: that order is one of the machine."""
    together = rank_speeds(Comparison(in_stretches(["ddp", "fsdp", "zero3"], slow="zero3")).groups)
    assert [together.to_base[name].order for name in ("fsdp", "zero3")] == ["equal", "slower"]
    assert together.to_base["fsdp"].rounds == 7
    joined = rank_speeds(Comparison(in_stretches(["ddp", "zero3"], ["fsdp"], slow="zero3")).groups)
    assert [joined.to_base[name].order for name in ("fsdp", "zero3")] == ["open", "slower"]
    assert [joined.to_base[name].rounds for name in ("fsdp", "zero3")] == [1, 7]
    unknown = {
        name: {n: replace(run, began=None) for n, run in of.items()} for name, of in joined.values.items()
    }
    assert Ranking(unknown, joined.base).to_base["fsdp"].order == "slower"


@pytest.mark.parametrize(
    ("late", "compared"),
    [([5], [n for n in range(7) if n != 2]), (range(5, 14), [*range(7)])],
    ids=["a run that is repeated later", "a round that is completed later"],
)
def test_a_round_counts_whose_runs_are_neighbours(late: Sequence[int], compared: list[int]) -> None:
    made = in_stretches(["ddp", "fsdp"])
    assert (made[5].backend.label, made[5].repeat) == ("fsdp", 2)
    again = [changed(made[n], created_at=f"2026-01-02T03:{35 + n}:00.000+00:00") for n in late]
    kept = [record for n, record in enumerate(made) if n not in late]
    order = rank_speeds(Comparison([*kept, *again]).groups)
    assert logs(order).keys() == {(0, n, 0) for n in compared}


def test_a_round_that_the_user_ended_takes_no_order_away() -> None:
    made = [record for n in range(7) for record in neighboured(n)]
    ended = ErrorPart(kind="Interrupted", message="interrupted")
    made[-2:] = [r.model_copy(update={"status": "failed", "error": ended}) for r in made[-2:]]
    assert made[-1].was_interrupted
    groups = Comparison(made).groups
    assert [(group.succeeded, len(group.rows)) for group in groups] == [(True, 6)] * 2
    assert rank_speeds(groups).ratio("fsdp", "ddp").order == "slower"
    assert not Comparison(made[-2:]).groups[0].succeeded


def test_the_reference_is_ranked_with_none() -> None:
    alone = make_record(label="single", world_size=1)
    comparison = Comparison([alone, *(make_record(label=label, world_size=1) for label in ("fsdp", "ddp"))])
    (order,) = comparison.rankings.values()
    assert (order.names, order.base) == (("ddp", "fsdp"), "ddp")


def test_programs_get_the_ratio_of_each_cell_and_its_order() -> None:
    made = [
        make_record(label=label, repeat=n, run_id=f"{label}-{n}", steps=make_steps(seconds=seconds * drift))
        for label, seconds in (("ddp", 1.0), ("zero3", 4.0))
        for n, drift in enumerate(DRIFT)
    ]
    rows = Comparison([make_record(label="single"), *made]).as_json()["rows"]
    names = ("speed_base", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_order")
    found = {row["backend"]: [row[name] for name in names] for row in rows}
    assert found["single"] == [None] * 5
    assert found["ddp"] == ["ddp", 1.0, 1.0, 1.0, "equal"]
    assert found["zero3"] == ["ddp", *[pytest.approx(0.25)] * 3, "slower"]
