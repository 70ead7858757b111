import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.comparison import Comparison
from harness.judge.facts import SPEED, STEP
from harness.judge.rows import rank_speeds
from harness.judge.statistics import EQUAL, ByRound, Interval, Ranking, frontier
from harness.record import ErrorPart, Record, TurnsPart
from harness.tell.tables import ratio_cell, unranked_words
from tests.records import make_record, make_steps

DRIFT = [1.0, 1.3, 0.8, 2.0, 1.1, 3.0, 0.9]
"""Of a machine, over rounds: more than cells differ."""
NOISE = [1.0, 1.02, 0.99, 1.01, 0.98, 1.01, 1.0]


def rounds(seconds: float, noise: Sequence[float] = NOISE, shift: int = 0) -> dict[tuple[int, ...], float]:
    """Seconds of a cell on a machine that drifts; `shift` moves its own noise."""
    return {(0, n): seconds * drift * noise[(n + shift) % len(noise)] for n, drift in enumerate(DRIFT)}


def order_of(**cells: ByRound) -> Ranking:
    """The first is the base."""
    return Ranking(cells, next(iter(cells)))


UNLIKE = [1.0, 2.0, 0.5, 1.6, 0.6, 1.2, 0.8]
"""Noise that hides an order."""


def test_cells_are_compared_within_rounds() -> None:
    """The runs of both overlap by far; in each round one is ahead by a tenth."""
    order = order_of(ddp=rounds(1.0), fsdp=rounds(1.1, shift=3))
    assert max(order.values["ddp"].values()) > 2 * min(order.values["fsdp"].values())
    ratio = order.ratio("fsdp", "ddp")
    assert (ratio.order, ratio.rounds) == ("slower", 7)
    assert ratio.middle == pytest.approx(1 / 1.1, rel=0.02)
    assert ratio.extent is not None
    assert ratio.extent.low < 1 / 1.1 < ratio.extent.high < 1
    assert order.ratio("ddp", "fsdp").order == "faster"
    assert order.tiers == (("ddp",), ("fsdp",))


def test_cells_whose_interval_lies_close_to_one_are_equal() -> None:
    order = order_of(ddp=rounds(1.0), zero0=rounds(1.001, shift=3), zero3=rounds(4.0, shift=1))
    assert order.ratio("zero0", "ddp").order == "equal"
    assert (order.leaders, order.trailers) == (("ddp", "zero0"), ("zero3",))
    assert EQUAL == 0.05


def test_a_difference_that_the_rounds_do_not_settle_is_open() -> None:
    order = order_of(ddp=rounds(1.0), fsdp=rounds(1.3, UNLIKE), zero3=rounds(9.0))
    assert order.ratio("fsdp", "ddp").order == "open"
    cells = [ratio_cell(order, name) for name in ("ddp", "fsdp", "zero3")]
    assert [cell.text[0] for cell in cells if cell] == ["1", "~", "0"]
    assert [cell.is_strong for cell in cells if cell] == [False, False, True]


def test_several_may_be_slowest() -> None:
    order = order_of(ddp=rounds(1.0), fsdp=rounds(3.0, UNLIKE), zero3=rounds(3.5))
    assert order.trailers == ("fsdp", "zero3")


def test_fewer_than_six_rounds_have_a_ratio_and_no_interval() -> None:
    few = {name: dict(list(of.items())[:5]) for name, of in (("a", rounds(1.0)), ("b", rounds(9.0)))}
    order = Ranking(few, "a")
    assert (order.is_judged, order.tiers) == (False, (("a", "b"),))
    assert order.to_base["b"].middle == pytest.approx(1 / 9)
    assert order.to_base["b"].extent is None
    assert unranked_words(order) == "too few rounds to rank 2 cells: 5 of 6"


def test_a_round_in_which_a_cell_has_no_figure_is_left_out_for_it_alone() -> None:
    lacking = {key: value for key, value in rounds(2.0).items() if key != (0, 3)}
    order = order_of(ddp=rounds(1.0), fsdp=lacking, zero3=rounds(3.0))
    assert [order.to_base[name].rounds for name in ("fsdp", "zero3")] == [6, 7]
    assert [order.to_base[name].order for name in ("fsdp", "zero3")] == ["slower", "slower"]


def test_cells_that_share_no_round_are_compared_with_nothing() -> None:
    order = order_of(ddp=rounds(1.0), fsdp={(1, *key[1:]): value for key, value in rounds(2.0).items()})
    assert order.ratio("fsdp", "ddp").middle is None
    assert ratio_cell(order, "fsdp") is None
    assert not order.is_judged
    assert order.figures("fsdp")["speed_base"] is None


def test_a_cell_without_a_round_in_common_is_not_called_slowest() -> None:
    apart = {(1, *key[1:]): value for key, value in rounds(9.0).items()}
    order = order_of(ddp=rounds(1.0), fsdp=apart, zero3=rounds(2.0))
    assert (order.names[-1], order.trailers) == ("zero3", ("zero3",))


def test_an_order_that_does_not_hold_in_each_session_is_none() -> None:
    other = {(1, 0): 1.0}
    ours, theirs = {**rounds(1.0), **other}, {**rounds(2.0), (1, 0): 0.9}
    assert order_of(ddp=ours, fsdp=theirs).ratio("fsdp", "ddp").order == "open"
    assert order_of(ddp=ours, fsdp={**theirs, (1, 0): 2.1}).ratio("fsdp", "ddp").order == "slower"


def test_memory_buys_speed_only_where_each_step_is_shown() -> None:
    order = order_of(
        lean=rounds(2.0), middle=rounds(1.5, UNLIKE), fat=rounds(1.0), fatter=rounds(0.999, shift=2)
    )
    peaks = {"lean": 1.0, "middle": 2.0, "fat": 3.0, "fatter": 4.0}
    assert frontier(peaks, order) == ["lean", "fat"]
    single = Ranking({name: {(0, 0): of[0, 0]} for name, of in order.values.items()}, "lean")
    assert frontier(peaks, single) == ["lean"]


CELL = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 7)), st.floats(0.01, 10.0), min_size=1)


@given(st.dictionaries(st.sampled_from("abcde"), CELL, min_size=1))
def test_no_order_goes_in_a_circle(values: dict[str, dict[tuple[int, ...], float]]) -> None:
    order = Ranking(values, next(iter(values)))
    compared = [name for name, of in values.items() if name == order.base or {*of} & {*values[order.base]}]
    assert sorted(name for tier in order.tiers for name in tier) == sorted(compared)
    assert order.leaders
    assert order.trailers
    for earlier, tier in enumerate(order.tiers):
        for later in order.tiers[earlier + 1 :]:
            assert all(order.is_ahead(left, right) for left in tier for right in later)


STEPS = st.tuples(st.floats(0.01, 10.0), st.floats(0.01, 10.0))
"""The timed steps of a run."""


def runs(label: str, timed: Sequence[tuple[float, float]]) -> list[Record]:
    return [
        make_record(label=label, run_id=f"{label}-{n}", steps=make_steps(changes={
            2: {"seconds": first}, 3: {"seconds": second},
        }))
        for n, (first, second) in enumerate(timed)
    ]  # fmt: skip


@given(st.lists(st.lists(STEPS, min_size=7, max_size=8), min_size=2, max_size=4))
def test_rates_and_step_times_have_one_order(cells: list[list[tuple[float, float]]]) -> None:
    comparison = Comparison(record for n, of in enumerate(cells) for record in runs(f"fsdp:prefetch={n}", of))
    (order,) = comparison.rankings.values()
    for group in comparison.groups:
        steps, rates = group.by_round(STEP), group.by_round(SPEED)
        base = next(other for other in comparison.groups if other.label == order.base)
        for key in steps.keys() & base.by_round(STEP).keys():
            ratios = [of[key] / base.by_round(name)[key] for of, name in ((steps, STEP), (rates, SPEED))]
            assert math.isclose(*ratios, rel_tol=1e-9)


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


@pytest.mark.parametrize("key", [SPEED, STEP])
def test_cells_that_took_turns_are_compared_as_their_throughputs_are(key: str) -> None:
    """A table that holds tokens/s beside the ratio holds no contradiction."""
    groups = Comparison(record for n in range(7) for record in neighboured(n)).groups
    order = rank_speeds(groups, key)
    rates = {group.label: group.by_round(SPEED) for group in groups}
    assert order.by_round("fsdp", "ddp") == {
        number: pytest.approx(math.log(rates["ddp"][number] / rates["fsdp"][number]))
        for number in rates["ddp"]
    }
    ratio = order.ratio("fsdp", "ddp")
    assert (ratio.rounds, ratio.order) == (7, "slower")
    assert ratio.extent == Interval(pytest.approx(1 / 1.1), pytest.approx(1 / 1.1))


def test_cells_that_did_not_run_alike_in_a_round_are_not_compared_in_it() -> None:
    """One of a round ran again later, beside other cells, or whole."""
    apart = Comparison(record for n in range(7) for record in neighboured(n, beside="zero3"))
    assert rank_speeds(apart.groups).by_round("fsdp", "ddp") == {}
    alike = [record for n in range(7) for record in neighboured(n)]
    mixed = [alike[0].model_copy(update={"turns": None}), *alike[1:]]
    order = rank_speeds(Comparison(mixed).groups)
    assert set(order.by_round("fsdp", "ddp")) == {(0, n, 0) for n in range(1, 7)}


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
                found.append(
                    make_record(
                        label=label,
                        repeat=n,
                        run_id=f"{label}-{n}",
                        steps=make_steps(seconds=seconds),
                        created_at=f"2026-01-02T03:{minute:02}:00.000+00:00",
                    )
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
    assert replace(joined, began={}).to_base["fsdp"].order == "slower"


def test_a_run_that_is_repeated_later_is_compared_in_no_round() -> None:
    made = in_stretches(["ddp", "fsdp"])
    late = made[5].model_copy(update={"created_at": "2026-01-02T03:40:00.000+00:00"})
    order = rank_speeds(Comparison([*made[:5], *made[6:], late]).groups)
    assert (late.backend.label, late.repeat) == ("fsdp", 2)
    assert set(order.by_round("fsdp", "ddp")) == {(0, n, 0) for n in range(7) if n != 2}


def test_a_round_that_was_interrupted_counts_when_it_is_complete() -> None:
    made = in_stretches(["ddp", "fsdp"])
    late = [
        record.model_copy(update={"created_at": f"2026-01-02T03:{40 + n}:00.000+00:00"})
        for n, record in enumerate(made[5:])
    ]
    order = rank_speeds(Comparison([*made[:5], *late]).groups)
    assert set(order.by_round("fsdp", "ddp")) == {(0, n, 0) for n in range(7)}


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
