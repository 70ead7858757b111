from typing import Any

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


SLOWER, RISES = "tokens_per_second<-3%", "sent_bytes_per_step>+5%"


@pytest.mark.parametrize(
    ("condition", "before", "after", "lines"),
    [
        (SLOWER, [0.5], [0.6], ["changed by -16.7 %, from 2048 to 1706.67"]),
        ("tokens_per_second<-20%", [0.5], [0.6], []),
        (SLOWER, [0.6], [0.5], []),
        (SLOWER, [0.5, 0.55, 0.6, 0.6], [0.52, 0.58, 0.6, 0.62], []),
        (SLOWER, [0.5, 0.55, 0.6], [0.52, 0.58, 0.62], ["too few runs to tell it from noise"]),
        ("model_state_bytes>+5%", [0.5], {"ranks": make_ranks(2, 32_000)}, ["changed by +100.0 %"]),
        ("peak_bytes>+5%", [0.5], {"ranks": []}, ["ddp on 2 ranks: peak_bytes is n/a now"]),
        ("peak_bytes>+5%", {"ranks": []}, {"ranks": []}, ["could not be checked"]),
        (RISES, {"comm": []}, [0.5], ["was 0"]),
    ],
    ids=["slower", "within", "faster", "noise", "not judged", "more", "lost", "unchecked", "out of nothing"],
)
def test_a_condition_fails_where_it_is_met_or_cannot_be_told(
    condition: str, before: Any, after: Any, lines: list[str]
) -> None:
    sides = [rows(*of) if isinstance(of, list) else rows(0.5, **of) for of in (before, after)]
    found = failed(condition, *sides)
    assert len(found) == len(lines)
    assert all(text in line for text, line in zip(lines, found, strict=True))


def test_cell_that_was_lost_fails_whatever_the_condition() -> None:
    before = rows(0.5)
    assert failed("peak_bytes>+5%", before, rows(0.5, status="failed"))[0] == (
        "ddp on 2 ranks: was ok, is failed"
    )
    other = Comparison([make_record(label="fsdp")])
    assert failed("peak_bytes>+5%", before, other)[0].endswith("not in the other records")


def test_a_cell_that_is_not_the_same_job_any_more_fails() -> None:
    before = Comparison([make_record(), make_record(label="ddp")])
    after = Comparison([make_record(), make_record(label="ddp", initial_weights=make_weights("d" * 64))])
    assert failed("peak_bytes>+5%", before, after) == [
        "ddp on 2 ranks: is not the same job as the others any more"
    ]
