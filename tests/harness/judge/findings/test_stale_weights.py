"""Weights in use that are not the masters, before the first step or at the end."""

from __future__ import annotations

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from tests.records import make_record, make_steps


def found(*, before: int | None, end: int | None, losses: tuple[float, ...] | None = None) -> list[Finding]:
    record = make_record(label="zero2", **({"steps": make_steps(losses=losses)} if losses else {}))
    assert record.initial_weights is not None
    assert record.final_weights is not None
    copied = {"copied_elements": 1000}
    changed = record.model_copy(update={
        "initial_weights": record.initial_weights.model_copy(update=copied | {"stale_elements": before}),
        "final_weights": record.final_weights.model_copy(update=copied | {"stale_elements": end}),
    })  # fmt: skip
    findings: list[Finding] = Comparison([make_record(), changed]).findings
    return [f for f in findings if f.id in ("weights-in-use-stale", "diverged")]


@pytest.mark.parametrize("count", [0, None], ids=["all equal", "not known"])
def test_copies_that_are_their_masters_are_no_finding(count: int | None) -> None:
    assert found(before=count, end=count) == []


def test_it_says_how_many_and_when() -> None:
    (finding,) = found(before=0, end=1)
    assert finding.message.endswith("rounded to their dtype: 1 of 1,000 at the end")
    assert finding.values == {"at the end": {"stale": 1, "copied": 1000}}
    (finding,) = found(before=900, end=2)
    assert finding.message.endswith("900 of 1,000 before the first step and 2 of 1,000 at the end")


def test_a_first_loss_that_differs_is_explained_by_them() -> None:
    stale, diverged = found(before=900, end=0, losses=(9.0, 3.0, 2.0, 1.0))
    assert stale.id == "weights-in-use-stale"
    assert "forward passes use other weights than the masters, see weights-in-use-stale" in diverged.message
