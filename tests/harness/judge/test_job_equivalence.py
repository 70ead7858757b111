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
