from typing import Any

import pytest

from harness.judge.job_equivalence import job_differences
from harness.record import ObservedPart
from tests.records import make_ranks, make_record, make_steps, make_weights


def first(reference: dict[str, Any], given: dict[str, Any]) -> str:
    return job_differences(make_record(**reference), make_record(label="ddp", **given))[0].differs


def digests(sample: str) -> dict[str, Any]:
    return {"ranks": [rank.model_copy(update={"batch_digests": [[sample]]}) for rank in make_ranks(1)]}


@pytest.mark.parametrize(
    ("reference", "given", "clause"),
    [
        ({}, {"initial_weights": make_weights("d" * 64)}, "initial weights differ"),
        (digests("a"), digests("b"), "samples of step 0 differ"),
        ({}, {"steps": make_steps(changes={3: {"samples": 7}})}, "samples of step 3 differ"),
        ({}, {"steps": make_steps()[:3]}, "number of steps differs"),
        ({}, {"observed": ObservedPart(optimizer_steps=2)}, "optimizer steps differ"),
        ({}, {"steps": make_steps(changes={2: {"learning_rate": 1.0}})}, "learning rate of step 2 differs"),
        ({}, {"job_id": "b" * 12, "training": {"steps": 5}}, "training.steps differs"),
        ({}, {"steps": make_steps(changes={1: {"target_tokens": 9}})}, "target_tokens of step 1 differs"),
    ],
)
def test_every_field_has_the_verb_of_its_number(
    reference: dict[str, Any], given: dict[str, Any], clause: str
) -> None:
    assert first(reference, given) == clause


def groups(rates: dict[str, float], steps: int = 4) -> dict[str, Any]:
    """A run whose optimizer holds each parameter in a group of its own, with a rate of its own."""
    return {
        "observed": ObservedPart(
            optimizer_groups=[{"parameters": [name]} for name in rates],
            learning_rates=[[rate] * steps for rate in rates.values()],
        )
    }


def test_rates_are_compared_by_parameter_whatever_the_order_of_the_groups() -> None:
    rates = {"a": 1e-3, "b": 5e-4}
    swapped = dict(reversed(rates.items()))
    assert job_differences(make_record(**groups(rates)), make_record(label="ddp", **groups(swapped))) == []
    (found,) = job_differences(
        make_record(**groups(rates)), make_record(label="ddp", **groups({**rates, "b": 1e-3}))
    )
    assert found.field == "learning rate of step 0 for 1 parameter, such as b"
    assert (found.reference, found.given) == (5e-4, 1e-3)
