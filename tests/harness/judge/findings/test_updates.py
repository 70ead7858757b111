"""Updates that are not what Adam makes of gradients, in words."""

from __future__ import annotations

import pytest

from harness.judge.comparison import Comparison
from harness.judge.wording import entries
from harness.record import ObservedPart, OddUpdatePart, Record
from harness.record.measured import OddUpdate
from tests.records import make_ranks, make_record


def run(*odd: OddUpdatePart | None, phases: dict[str, int] | None = None, label: str = "ddp") -> Record:
    """Of a rank for each."""
    parts = [
        part.model_copy(update={"odd_update": one})
        for part, one in zip(make_ranks(len(odd)), odd, strict=True)
    ]
    seen = ObservedPart(updates_by_phase=phases or {"step": 2})
    return make_record(label=label, ranks=parts, observed=seen)


def found(record: Record, reference: Record | None = None) -> list[str]:
    findings = Comparison([reference or make_record(), record]).findings
    return [finding.message for finding in findings if finding.id == "update-altered"]


def odd(kind: OddUpdate, step: int = 2, **values: object) -> OddUpdatePart:
    return OddUpdatePart(step=step, kind=kind, **values)  # type: ignore[arg-type]


def test_one_rank_is_named_with_its_step_and_its_parameters() -> None:
    still = odd("stood-still", parameters=["a", "b", "c", "d"])
    assert found(run(None, still)) == [
        "ddp on 2 ranks: the update of step 2 (ranks: 1) is not what Adam makes of its gradient: weights "
        "stay as they were, in a, b, c and 1 more"
    ]


def test_what_all_ranks_do_is_said_once_and_of_the_first_step() -> None:
    first, later = odd("beta2", given=0.999, due=0.95), odd("weights", step=3)
    assert found(run(first, first)) == [
        "ddp on 2 ranks: the update of step 2 is not what Adam makes of its gradient: second moments follow "
        "beta2 0.999 and not 0.95"
    ]
    (message,) = found(run(later, first))
    assert "of step 2 (ranks: 1)" in message


def test_a_dtype_is_named_by_its_bits() -> None:
    (message,) = found(run(odd("moments-rounded", given=8.0)))
    assert message.endswith("moments are rounded to bfloat16")


def test_what_the_reference_does_too_is_no_finding() -> None:
    both = odd("weights")
    assert found(run(both), run(both, label="single")) == []


def test_updates_outside_of_their_step_are_not_judged() -> None:
    assert found(run(odd("weights"), phases={"step": 1, "forward": 1})) == []


@pytest.mark.parametrize("kind", entries()["update-altered"]["text"])
def test_every_kind_has_words(kind: OddUpdate) -> None:
    (message,) = found(run(odd(kind, given=8.0, due=4.0)))
    assert "{" not in message
    assert "None" not in message
