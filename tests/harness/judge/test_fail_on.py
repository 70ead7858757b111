import pytest

from harness.errors import HarnessError
from harness.judge.changes import failures, parse_conditions
from harness.judge.comparison import Comparison
from tests.records import make_ranks, make_record, make_steps, make_weights


def rows(*seconds: float, **changes: object) -> Comparison:
    return Comparison(
        make_record(label="ddp", repeat=n, run_id=f"ddp-{n}", steps=make_steps(seconds=s), **changes)
        for n, s in enumerate(seconds)
    )


def failed(text: str, before: Comparison, after: Comparison) -> list[str]:
    return failures(parse_conditions(text), before, after)


def test_two_conditions_are_read() -> None:
    texts = [str(c) for c in parse_conditions(" peak_bytes > +5% , tokens_per_second<-3%")]
    assert texts == ["peak_bytes>+5%", "tokens_per_second<-3%"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a condition is a measure"),
        ("peak_bytes", "a condition is a measure"),
        ("peak_bytes>5", "a condition is a measure"),
        ("peak_bytes>=5%", "a condition is a measure"),
        ("peak_byte>+5%", "Did you mean 'peak_bytes'"),
        ("tokens_per_second>-3%", "no change can meet"),
        ("peak_bytes>+5%,", "a condition is a measure"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, told: str) -> None:
    with pytest.raises(HarnessError, match=told.replace("?", r"\?")):
        parse_conditions(text)


def test_slower_than_allowed_fails() -> None:
    (line,) = failed("tokens_per_second<-3%", rows(0.5), rows(0.6))
    assert line.startswith("ddp on 2 ranks: tokens_per_second changed by -16.7 %, from 2048 to 1706.67")


def test_slower_within_the_limit_passes() -> None:
    assert failed("tokens_per_second<-20%", rows(0.5), rows(0.6)) == []


def test_faster_does_not_fail_a_limit_on_falling() -> None:
    assert failed("tokens_per_second<-3%", rows(0.6), rows(0.5)) == []


def test_noise_does_not_fail() -> None:
    assert failed("tokens_per_second<-3%", rows(0.5, 0.55, 0.6, 0.6), rows(0.52, 0.58, 0.6, 0.62)) == []


def test_what_is_not_judged_fails_and_says_so() -> None:
    (line,) = failed("tokens_per_second<-3%", rows(0.5, 0.55, 0.6), rows(0.52, 0.58, 0.62))
    assert line.endswith("too few runs to tell it from noise")


def test_more_memory_than_allowed_fails() -> None:
    more = rows(0.5, ranks=make_ranks(2, 32_000))
    (line,) = failed("model_state_bytes>+5%", rows(0.5), more)
    assert "changed by +100.0 %" in line


def test_measure_that_was_lost_fails() -> None:
    (line,) = failed("peak_bytes>+5%", rows(0.5), rows(0.5, ranks=[]))
    assert "peak_bytes is n/a now" in line


def test_cell_that_was_lost_fails_whatever_the_condition() -> None:
    before = rows(0.5)
    assert failed("peak_bytes>+5%", before, rows(0.5, status="failed"))[0] == (
        "ddp on 2 ranks: was ok, is failed"
    )
    other = Comparison([make_record(label="fsdp")])
    assert failed("peak_bytes>+5%", before, other)[0].endswith("not in the other records")


def test_condition_that_cannot_be_checked_fails() -> None:
    (line,) = failed("peak_bytes>+5%", rows(0.5, ranks=[]), rows(0.5, ranks=[]))
    assert "could not be checked" in line


def test_something_out_of_nothing_fails_a_limit_on_rising() -> None:
    (line,) = failed("sent_bytes_per_step>+5%", rows(0.5, comm=[]), rows(0.5))
    assert "was 0" in line


def test_a_cell_that_is_not_the_same_job_any_more_fails() -> None:
    before = Comparison([make_record(), make_record(label="ddp")])
    after = Comparison([make_record(), make_record(label="ddp", initial_weights=make_weights("d" * 64))])
    assert failed("peak_bytes>+5%", before, after) == [
        "ddp on 2 ranks: is not the same job as the others any more"
    ]
