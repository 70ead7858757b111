import math
from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED, STEP
from harness.judge.ranking import difference, frontier, ranking
from harness.record import Record
from harness.tell.order_words import runs_needed_words, slowest_words, unranked_words
from tests.records import make_record, make_steps

FAST, SLOW = [1.0, 1.01, 1.02, 1.03, 1.04], [2.0, 2.01, 2.02, 2.03, 2.04]
BETWEEN = [1.0, 1.2, 1.5, 1.9, 2.2]


def one(**runs: Sequence[float]) -> dict[str, dict[int, Sequence[float]]]:
    return {name: {0: values} for name, values in runs.items()}


def test_cells_that_are_apart_are_in_tiers() -> None:
    order = ranking(one(slow=SLOW, fast=FAST))
    assert order.tiers == (("fast",), ("slow",))
    assert (order.leaders, order.trailers) == (("fast",), ("slow",))
    assert order.is_ahead("fast", "slow")
    assert not order.is_ahead("slow", "fast")


def test_a_cell_that_is_tied_with_both_sides_joins_them_and_its_rivals_stay_ordered() -> None:
    order = ranking(one(fast=FAST, slow=SLOW, between=BETWEEN))
    assert order.tiers == (("fast", "between", "slow"),)
    assert order.is_ahead("fast", "slow")
    assert order.leaders == ("fast", "between")
    assert order.trailers == ("between", "slow")


def test_the_slowest_is_named_with_those_that_are_tied_with_it() -> None:
    order = ranking(one(fast=FAST, slow=SLOW, slower=[value + 0.005 for value in SLOW]))
    assert slowest_words(order) == "slower lowest at 50 % of fast, statistically tied with slow"
    assert slowest_words(ranking(one(fast=FAST, slow=SLOW))) == "slow slowest at 50 % of fast"
    assert slowest_words(ranking(one(fast=FAST, between=BETWEEN))) == ""


def test_runs_that_overlap_are_in_no_order() -> None:
    """As zero2 and ddp of a published page, whose medians were 119 and 123 ms."""
    order = ranking(one(zero2=[0.110, 0.119, 0.131, 0.125], ddp=[0.112, 0.123, 0.128, 0.135]))
    assert order.tiers == (("zero2", "ddp"),)
    assert order.judgement("ddp", "zero2") == "within noise"


def test_so_few_runs_that_nothing_could_be_shown_state_no_order() -> None:
    order = ranking(one(fast=[1.0, 1.0, 1.0], slow=[9.0, 9.0, 9.0]))
    assert (order.tiers, order.is_judged) == ((("fast", "slow"),), False)
    assert unranked_words(order) == "too few runs to rank 2 cells: each needs 4"


def test_a_difference_beyond_chance_whose_intervals_overlap_is_no_order() -> None:
    fast = [*(1.0 + 0.01 * n for n in range(8)), 1.9]
    slow = [*(2.0 + 0.01 * n for n in range(8)), 1.5]
    assert difference({0: fast}, {0: slow}) == "beyond noise"
    assert difference({0: fast[-6:]}, {0: slow[-6:]}) == "within noise"


def test_cells_are_compared_within_occasions() -> None:
    """Days differ by more than the cells do, which are apart on each day."""
    fast = {0: [1.0, 1.01, 1.02], 1: [3.0, 3.01, 3.02]}
    slow = {0: [1.1, 1.11, 1.12], 1: [3.1, 3.11, 3.12]}
    assert difference({0: [*fast[0], *fast[1]]}, {0: [*slow[0], *slow[1]]}) == "within noise"
    assert difference(fast, slow) == "beyond noise"


def test_an_order_that_does_not_hold_on_each_occasion_is_none() -> None:
    fast = {0: [1.0, 1.01, 1.02, 1.03], 1: [1.0, 1.01, 1.02, 1.03], 2: [2.0]}
    slow = {0: [2.0, 2.01, 2.02, 2.03], 1: [2.0, 2.01, 2.02, 2.03], 2: [1.9]}
    assert difference(fast, slow) == "within noise"
    assert difference({0: fast[0], 1: fast[1]}, {0: slow[0], 1: slow[1]}) == "beyond noise"


def test_cells_that_never_ran_on_one_occasion_are_not_judged() -> None:
    assert difference({0: FAST}, {1: SLOW}) == "not judged"


def test_no_order_contradicts_the_medians_that_are_shown() -> None:
    fast = {0: FAST, 1: [9.0] * 20}
    assert difference(fast, {0: SLOW}) == "within noise"


def test_memory_buys_speed_only_where_each_step_is_beyond_noise() -> None:
    values = one(lean=SLOW, middle=BETWEEN, fat=FAST, fatter=[value - 0.001 for value in FAST])
    peaks = {"lean": 1.0, "middle": 2.0, "fat": 3.0, "fatter": 4.0}
    more = {name: {0: [*runs[0], *(value + 0.005 for value in runs[0])]} for name, runs in values.items()}
    assert frontier(peaks, ranking(more)) == ["lean", "fat"]
    assert frontier(peaks, ranking({n: {0: r[0][:1]} for n, r in values.items()})) == ["lean"]


FIGURES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


CELL = st.dictionaries(st.integers(0, 2), FIGURES, min_size=1)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), CELL, min_size=1))
def test_no_order_goes_in_a_circle_or_against_the_medians(values: dict[str, dict[int, list[float]]]) -> None:
    order = ranking(values)
    assert sorted(name for tier in order.tiers for name in tier) == sorted(values)
    assert order.leaders
    assert order.trailers
    for earlier, tier in enumerate(order.tiers):
        for later in order.tiers[earlier + 1 :]:
            assert all(order.is_ahead(left, right) for left in tier for right in later)
    for left, right in order.judgements:
        if order.is_ahead(left, right):
            assert order.median(left) < order.median(right)


STEPS = st.tuples(st.floats(0.01, 10.0), st.floats(0.01, 10.0))
"""The timed steps of a run."""


def runs(label: str, timed: Sequence[tuple[float, float]]) -> list[Record]:
    return [
        make_record(label=label, run_id=f"{label}-{n}", steps=make_steps(changes={
            2: {"seconds": first}, 3: {"seconds": second},
        }))
        for n, (first, second) in enumerate(timed)
    ]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=2, max_size=4))
def test_rates_and_step_times_rank_no_two_cells_oppositely(cells: list[list[tuple[float, float]]]) -> None:
    records = [record for n, timed in enumerate(cells) for record in runs(f"fsdp:prefetch={n}", timed)]
    comparison = Comparison(records)
    figures = [group.figures for group in comparison.groups]
    for left, right in combinations(figures, 2):
        steps, rates = ([side[key] or 0.0 for side in (left, right)] for key in (STEP, SPEED))
        if not math.isclose(*steps):
            assert (steps[0] < steps[1]) == (rates[0] > rates[1])
    (order,) = comparison.rankings.values()
    shown = {group.label: group.figures[STEP] or 0.0 for group in comparison.groups}
    for left, right in order.judgements:
        assert not order.is_ahead(left, right) or shown[left] < shown[right]


def test_the_reference_is_ranked_with_none() -> None:
    alone = make_record(label="single", world_size=1)
    comparison = Comparison([alone, *(make_record(label=label, world_size=1) for label in ("ddp", "fsdp"))])
    (order,) = comparison.rankings.values()
    assert order.names == ("ddp", "fsdp")
    assert runs_needed_words(comparison.rankings) == "4 runs of each of the 2 cells on 1 rank"
