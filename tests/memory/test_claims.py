"""A backend that says what it is is held to that; one that says nothing is not."""

from __future__ import annotations

import pytest

from harness.judge.quantities import (
    expected_model_state_bytes,
    expected_sent_bytes_per_step,
    volume_differences,
)
from tests.memory.runs import LLAMA, Outcome, compare

pytestmark = pytest.mark.costly

BACKENDS = {
    "honest": "Honest",
    "hidden-copy": "HiddenCopy",
    "listed-copy": "ListedCopy",
    "reduced-twice": "ReducedTwice",
    "unclaimed": "Unclaimed",
    "own-forms": "OwnForms",
    "wrong-forms": "WrongForms",
}
JUDGED = ("memory-differs", "communication-differs", "synchronised-early")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    points = {name: f"tests.memory.claims:{target}" for name, target in BACKENDS.items()}
    names = ",".join(("ddp", *BACKENDS))
    return compare(
        tmp_path_factory.mktemp("claims"), names, 2, f"model.config={LLAMA}",
        "training.micro_batch_size=2", entry_points=points,
    )  # fmt: skip


def test_lies_are_named_and_nothing_else(outcome: Outcome) -> None:
    assert {record.status for record in outcome.records.values()} == {"ok"}
    found = {(f["id"], *f["backends"]) for f in outcome.document["findings"] if f["id"] in JUDGED}
    assert found == {
        ("memory-differs", "hidden-copy"),
        ("memory-differs", "listed-copy"),
        ("communication-differs", "reduced-twice"),
        ("memory-differs", "wrong-forms"),
        ("communication-differs", "wrong-forms"),
    }


def test_a_hidden_copy_has_its_size(outcome: Outcome) -> None:
    (finding,) = (f for f in outcome.findings("memory-differs") if f["backends"] == ["hidden-copy"])
    assert "that its backend does not list" in finding["message"]
    model = outcome.records["ddp"].model
    assert model is not None
    for difference in finding["values"]["differences"]:
        copy = difference["measured_bytes"] - difference["expected_bytes"]
        assert difference["kind"] == "other"
        assert copy == pytest.approx(4 * model.parameters, rel=0.1)


def test_reducing_twice_is_twice_the_payload(outcome: Outcome) -> None:
    (finding,) = (f for f in outcome.findings("communication-differs") if f["backends"] == ["reduced-twice"])
    assert "2 times as much" in finding["message"]


def test_a_record_keeps_what_its_backend_claims(outcome: Outcome) -> None:
    claim = outcome.records["honest"].backend.claim
    assert claim is not None
    assert (claim.family, claim.sharding, claim.stage) == ("ddp", "none", 0)
    for name in ("ddp", "unclaimed", "own-forms"):
        assert outcome.records[name].backend.claim is None


def test_own_closed_forms_are_those_that_the_built_in_backend_has(outcome: Outcome) -> None:
    own, built_in = outcome.records["own-forms"], outcome.records["ddp"]
    assert expected_model_state_bytes(own) == expected_model_state_bytes(built_in)
    assert expected_sent_bytes_per_step(own) == expected_sent_bytes_per_step(built_in)
    assert volume_differences(own) == []


def test_nothing_is_expected_of_a_backend_that_claims_nothing(outcome: Outcome) -> None:
    record = outcome.records["unclaimed"]
    assert expected_model_state_bytes(record) is None
    assert volume_differences(record) is None
