import pytest

from harness.job.job import Job
from harness.judge.comparison import Comparison
from harness.record import ObservedPart, Record
from tests.records import JOB, make_record


def messages(kind: str, wide: int | None) -> list[str]:
    job = Job.model_validate(JOB | {"optimizer": JOB["optimizer"] | {"kind": kind}})
    records: list[Record] = [
        make_record(label=label, job=job, observed=ObservedPart(wide_optimizer_bytes=wide))
        for label in ("single", "zero1")
    ]
    return [
        f.message
        for f in Comparison(records).findings
        if f.id == "low-bit-states-wide" and "zero1" in f.message
    ]


def test_states_in_full_width_are_named() -> None:
    (message,) = messages("adamw-8bit", 1_444_352)
    assert message.startswith("zero1 on 2 ranks: 1,444,352 bytes of optimizer states are in full width")


@pytest.mark.parametrize(("kind", "wide"), [("adamw-8bit", 0), ("adamw-8bit", None), ("adamw", 4096)])
def test_nothing_else_is(kind: str, wide: int | None) -> None:
    assert messages(kind, wide) == []
