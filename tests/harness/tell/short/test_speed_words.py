from random import Random

import pytest

from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.short.comparison_scope import comparison_scope
from harness.tell.short.verdict import NOTHING_TIMED, beside_speed_sentence, speed_sentence
from tests.harness.tell.short.records import repeats, stage_of
from tests.records import NORMS, make_record, make_steps, make_weights


def speed(*records: Record) -> str:
    return speed_sentence(stage_of(*records))


def test_fastest_and_slowest_are_named_where_the_rounds_show_them() -> None:
    text = speed(*repeats("ddp", *[0.5, 0.51] * 3), *repeats("zero3", *[1.0, 1.1] * 3))
    assert text.startswith("Speed on 2 ranks: ddp is fastest, at 2,028 tokens/s")
    assert "; zero3 is slowest, at half of ddp's speed" in text


def test_cells_that_are_equal_or_open_are_fastest_together() -> None:
    slow = repeats("zero3", *[1.0, 1.1] * 3)
    equal = speed(*repeats("ddp", *[0.5, 0.51] * 3), *repeats("fsdp", *[0.505, 0.515] * 3), *slow)
    assert (
        "ddp and fsdp are fastest (equal within 5 %), at 2,028 tokens/s; zero3 is slowest, at half of ddp's"
        in equal
    )
    unsettled = speed(*repeats("ddp", *[0.5, 0.51] * 3), *repeats("fsdp", *[0.4, 0.8] * 3), *slow)
    assert "nothing is measurably faster than ddp (2,028 tokens/s); zero3 is slowest" in unsettled


def test_of_more_than_two_candidates_one_is_named() -> None:
    seconds = {
        "ddp": (0.9, 1.0), "zero0": (0.5, 0.51), "fsdp": (0.8, 0.4), "fsdp1": (0.4, 0.8),
        "zero1": (4.0, 4.1), "zero2": (5.0, 3.0), "zero3": (3.0, 5.1),
    }  # fmt: skip
    text = speed(*(record for label, pair in seconds.items() for record in repeats(label, *pair * 4)))
    assert "is ddp" not in text
    assert " or one of 2 others (their order is open)" in text
    assert " and 2 others are slowest, at " in text


def test_single_runs_have_a_range_and_no_order() -> None:
    text = speed(*repeats("ddp", 0.5), *repeats("fsdp", 0.9), *repeats("zero3", 1.0))
    assert (
        "medians are 1,024 to 2,048 tokens/s; too few rounds to rank 3 cells: 1 of 6 (--repeats adds some)"
        in text
    )
    assert "fastest" not in text
    assert "slowest" not in text


@pytest.mark.parametrize("seed", range(12))
def test_an_order_is_claimed_only_where_the_comparison_has_one(seed: int) -> None:
    draw = Random(seed)
    middles = {label: draw.choice((0.5, 0.52, 0.6, 1.0)) for label in ("ddp", "zero1", "zero3", "fsdp")}
    spread = draw.choice((0.001, 0.05, 0.4))
    records = [
        record
        for label, middle in middles.items()
        for record in repeats(label, *(middle * (1 + spread * draw.random()) for _ in range(6)))
    ]
    comparison = Comparison(records)
    where = comparison_scope(comparison)
    assert where is not None
    text = speed_sentence(where)
    order = comparison.rankings[where.place]
    assert [name for name in order.names if f"{name} is fastest" in text] == (
        list(order.leaders) if len(order.leaders) == 1 else []
    )
    slowest = [name for name in order.names if f"{name} is slowest" in text]
    assert slowest in ([], [order.names[-1]])
    assert not slowest or all(order.is_ahead(other, order.names[-1]) for other in order.names[:-1])


def test_a_cell_that_was_timed_alone_is_not_called_fastest() -> None:
    text = speed(make_record(label="ddp"))
    assert "only ddp was timed, at 2,048 tokens/s" in text
    assert "fastest" not in text


def test_the_reference_alone_is_told() -> None:
    assert "Speed on 1 rank: only single was timed, at 2,048 tokens/s" in speed(make_record())


def test_the_speed_of_one_process_is_told_next_to_that_of_several() -> None:
    alone = make_record(steps=make_steps(seconds=0.25))
    cells = [*repeats("ddp", 0.5), *repeats("fsdp", 0.9)]
    assert beside_speed_sentence(stage_of(alone, *cells)).startswith(
        "One process trains at 4,096 tokens/s; all from one session: "
    )
    alone = alone.model_copy(update={"world": alone.world.model_copy(update={"threads_per_rank": 2})})
    text = beside_speed_sentence(stage_of(alone, *cells))
    assert text.startswith(
        "One process with 2 threads (ranks use 1) trains at 4,096 tokens/s; all from one session"
    )


def test_ranks_that_take_turns_on_cores_are_said_where_speed_is() -> None:
    wide = [make_record(label=label, world_size=16) for label in ("ddp", "fsdp")]
    two = [make_record(label=label) for label in ("ddp", "fsdp")]
    assert "ranks share processor cores, so these speeds say little" in speed(make_record(), *wide)
    assert "share processor" not in speed(make_record(), *two)


def test_runs_of_few_timed_steps_say_little() -> None:
    assert "; only 2 timed steps per run, so speeds are rough." in speed(*repeats("ddp", 0.5))


def test_cells_that_were_measured_otherwise_are_not_called_alone() -> None:
    other = make_record(label="fsdp")
    other = other.model_copy(update={"world": other.world.model_copy(update={"micro_batch_size": 1})})
    text = speed(make_record(), make_record(label="ddp"), other)
    assert "Speed on 2 ranks: no two cells were measured under the same conditions" in text
    assert "only ddp" not in text


def test_where_every_cell_diverged_there_is_no_speed_to_compare() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    assert speed(make_record(), wrong) == NOTHING_TIMED
