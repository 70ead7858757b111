from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.short.verdict import scaling_sentences
from tests.harness.tell.short.records import growing, repeats


def scaling(*records: Record) -> list[str]:
    return scaling_sentences(Comparison(records))


def test_speed_up_and_efficiency_are_those_at_the_most_ranks() -> None:
    assert scaling(*repeats("ddp", 0.8, world_size=1), *repeats("ddp", 0.5, world_size=2)) == [
        "Strong scaling, 2 ranks against 1, speed-up: ddp 1.60, 80 % efficient; "
        "medians of 1 run, not tested against noise."
    ]


def test_a_job_that_grows_with_the_ranks_has_weak_scaling_only() -> None:
    assert scaling(growing("ddp", 1, 0.5), growing("ddp", 2, 0.8)) == [
        "Weak scaling, 2 ranks against 1, efficiency: ddp 62 %; medians of 1 run, not tested against noise."
    ]


def test_on_one_number_of_ranks_there_is_none() -> None:
    assert scaling(*repeats("ddp", 0.5), *repeats("fsdp", 0.5)) == []


def test_of_many_curves_the_first_and_the_last_are_named() -> None:
    slower = {"ddp": 0.5, "zero2": 0.4, "fsdp": 0.8}
    records = [*(r for label in slower for r in repeats(label, 0.8, world_size=1))]
    records += [r for label, seconds in slower.items() for r in repeats(label, seconds, world_size=2)]
    (text,) = scaling(*records)
    assert "speed-up: most zero2 2.00, 100 % efficient, least fsdp 1.00, 50 % efficient; " in text


def test_seven_rounds_say_for_which_backends_more_ranks_are_faster() -> None:
    slowing = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0)
    seconds = {("ddp", 1): 0.8, ("ddp", 2): 0.5, ("fsdp", 1): 0.8, ("fsdp", 2): 1.0, ("zero2", 1): 0.8}
    records = [
        record
        for (label, size), each in (seconds | {("zero2", 2): 0.8}).items()
        for record in repeats(label, *(each * slow for slow in slowing), world_size=size)
    ]
    assert scaling(*records) == [
        "Strong scaling, 2 ranks against 1: a step on 2 ranks is faster with ddp"
        " (speed-up 1.60); as fast within 5 % with zero2 (speed-up 1.00); slower with fsdp (speed-up 0.80)."
    ]


def test_rounds_that_differ_settle_nothing() -> None:
    records = repeats("ddp", *[0.8] * 7, world_size=1)
    records += repeats("ddp", 0.4, 1.6, 0.5, 1.2, 0.6, 1.0, 0.8, world_size=2)
    (text,) = scaling(*records)
    assert text.endswith("; 7 runs show no difference from 1 rank.")


def test_of_several_that_are_slower_the_least_and_the_most_are_told() -> None:
    slowing = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0)
    seconds = {("ddp", 1): 0.8, ("ddp", 2): 1.0, ("fsdp", 1): 0.8, ("fsdp", 2): 2.0, ("zero2", 1): 0.8}
    records = [
        record
        for (label, size), each in (seconds | {("zero2", 2): 1.6}).items()
        for record in repeats(label, *(each * slow for slow in slowing), world_size=size)
    ]
    (text,) = scaling(*records)
    assert text.endswith("is slower with ddp, zero2 and fsdp (speed-up 0.80 down to 0.40).")
