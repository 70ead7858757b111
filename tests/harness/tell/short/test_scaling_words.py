from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.short.verdict import scaling_sentences
from tests.harness.tell.short.records import growing, repeats


def scaling(*records: Record) -> list[str]:
    return scaling_sentences(Comparison(records))


def test_speed_up_and_efficiency_are_those_at_the_most_ranks() -> None:
    assert scaling(*repeats("ddp", 0.8, world_size=1), *repeats("ddp", 0.5, world_size=2)) == [
        "Strong scaling from 1 to 2 ranks, speed-up (efficiency): ddp 1.60 (80 %); "
        "medians of 1 run, not tested against noise."
    ]


def test_a_job_that_grows_with_the_ranks_has_weak_scaling_only() -> None:
    assert scaling(growing("ddp", 1, 0.5), growing("ddp", 2, 0.8)) == [
        "Weak scaling from 1 to 2 ranks, efficiency: ddp 62 %; medians of 1 run, not tested against noise."
    ]


def test_on_one_number_of_ranks_there_is_none() -> None:
    assert scaling(*repeats("ddp", 0.5), *repeats("fsdp", 0.5)) == []


def test_of_many_curves_the_first_and_the_last_are_named() -> None:
    slower = {"ddp": 0.5, "zero2": 0.4, "fsdp": 0.8}
    records = [*(r for label in slower for r in repeats(label, 0.8, world_size=1))]
    records += [r for label, seconds in slower.items() for r in repeats(label, seconds, world_size=2)]
    (text,) = scaling(*records)
    assert "speed-up (efficiency): most zero2 2.00 (100 %), least fsdp 1.00 (50 %); " in text
