"""Defects of memory and lies about it, planted in real runs, are named; clean runs beside them are not."""

from pathlib import Path
from typing import Any

import pytest

from harness.judge import quantities
from tests.memory.conftest import LLAMA, Outcome, compare
from tests.memory.defects import HOARDED_BYTES, LEAKED_BYTES

pytestmark = [pytest.mark.long(seconds=30), pytest.mark.costly]
"""`tests/harness/judge/findings/test_memory.py` finds each in a record without ranks."""

DEFECTS = {
    "one-unit": "OneUnit", "one-unit-listed": "OneUnitListed", "leaking": "Leaking",
    "leaking-at-times": "LeakingEverySecondStep", "hoarding": "Hoarding",
}  # fmt: skip
CLAIMS = {
    "honest": "Honest", "hidden-copy": "HiddenCopy", "listed-copy": "ListedCopy",
    "reduced-twice": "ReducedTwice", "unclaimed": "Unclaimed", "own-forms": "OwnForms",
    "wrong-forms": "WrongForms",
}  # fmt: skip
LATER = {"leaking-later": "LeakingLater", "spiking": "Spiking", "hiding": "Hiding"}
JUDGED = {
    "memory-differs", "memory-grows", "memory-spikes", "memory-imbalance", "one-wrap-unit",
    "communication-differs", "synchronised-early",
}  # fmt: skip


def planted(folder: Path, built_in: tuple[str, ...], names: dict[str, str], *settings: str) -> Outcome:
    points = {name: f"tests.memory.defects:{target}" for name, target in names.items()}
    given = (f"model.config={LLAMA}", *settings)
    return compare(folder, ",".join((*built_in, *names)), 2, *given, entry_points=points)


def named(outcome: Outcome) -> set[tuple[str, ...]]:
    return {(f["id"], *f["backends"]) for f in outcome.document["findings"] if f["id"] in JUDGED}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    # Five probed steps tell a leak in every second one from a single allocation.
    steps = ("training.steps=6", "measure.probed_steps=5")
    built_in = ("ddp", "fsdp", "fsdp-grad-op")
    return planted(tmp_path_factory.mktemp("planted"), built_in, DEFECTS | CLAIMS, *steps)


def test_each_defect_and_lie_is_named_and_nothing_else(outcome: Outcome) -> None:
    assert {"single", "ddp", "fsdp", "fsdp-grad-op", *DEFECTS, *CLAIMS} <= set(outcome.records)
    assert {record.status for record in outcome.records.values()} == {"ok"}
    assert named(outcome) == {
        ("one-wrap-unit", "one-unit"), ("one-wrap-unit", "one-unit-listed"), ("memory-grows", "leaking"),
        ("memory-grows", "leaking-at-times"), ("memory-imbalance", "hoarding"),
        ("memory-differs", "hidden-copy"), ("memory-differs", "listed-copy"),
        ("communication-differs", "reduced-twice"), ("memory-differs", "wrong-forms"),
        ("communication-differs", "wrong-forms"),
    }  # fmt: skip


def test_the_leak_has_its_size(outcome: Outcome) -> None:
    always, at_times = (_of(outcome, "memory-grows", name) for name in ("leaking", "leaking-at-times"))
    assert always["bytes_per_step_by_rank"] == {"0": LEAKED_BYTES, "1": LEAKED_BYTES}
    for size in at_times["bytes_per_step_by_rank"].values():
        assert size == pytest.approx(LEAKED_BYTES / 2, rel=0.35)


@pytest.mark.parametrize(("name", "listed"), [("one-unit", 0), ("one-unit-listed", 3)])
def test_one_unit_gathers_the_whole_model(outcome: Outcome, name: str, listed: int) -> None:
    values = _of(outcome, "one-wrap-unit", name)
    whole = 4 * outcome.parameters(name)
    assert values["wrap_units"] == listed
    assert whole <= values["gathered_least_bytes"] <= values["gathered_peak_bytes"] <= 1.01 * whole


def test_a_unit_per_block_gathers_less(outcome: Outcome) -> None:
    peaks = [m.gathered_peak_bytes or 0 for r in outcome.records["fsdp"].ranks for m in r.memory]
    assert 0 < max(peaks) < 0.75 * 4 * outcome.parameters("fsdp")


def test_the_hoard_has_its_size(outcome: Outcome) -> None:
    first, last = _of(outcome, "memory-imbalance", "hoarding")["peak_bytes_by_rank"]
    assert last - first == pytest.approx(HOARDED_BYTES, rel=0.01)


def test_a_hidden_copy_has_its_size(outcome: Outcome) -> None:
    (finding,) = (f for f in outcome.findings("memory-differs") if f["backends"] == ["hidden-copy"])
    assert "that its backend does not list" in finding["message"]
    for difference in finding["values"]["differences"]:
        copy = difference["measured_bytes"] - difference["expected_bytes"]
        assert difference["kind"] == "other"
        assert copy == pytest.approx(4 * outcome.parameters("ddp"), rel=0.1)


def test_reducing_twice_is_twice_the_payload(outcome: Outcome) -> None:
    (finding,) = (f for f in outcome.findings("communication-differs") if f["backends"] == ["reduced-twice"])
    assert "2 times as much" in finding["message"]


def test_a_record_keeps_what_its_backend_claims(outcome: Outcome) -> None:
    claim = outcome.records["honest"].backend.claim
    assert (claim.family, claim.sharding, claim.stage) == ("ddp", "none", 0)
    for name in ("ddp", "unclaimed", "own-forms"):
        assert outcome.records[name].backend.claim is None


def test_own_closed_forms_are_those_that_the_built_in_backend_has(outcome: Outcome) -> None:
    own, built_in = outcome.records["own-forms"], outcome.records["ddp"]
    assert quantities.expected_model_state_bytes(own) == quantities.expected_model_state_bytes(built_in)
    assert quantities.expected_sent_bytes_per_step(own) == quantities.expected_sent_bytes_per_step(built_in)
    assert quantities.volume_differences(own) == []


def test_nothing_is_expected_of_a_backend_that_claims_nothing(outcome: Outcome) -> None:
    record = outcome.records["unclaimed"]
    assert quantities.expected_model_state_bytes(record) is None
    assert quantities.volume_differences(record) is None


def test_defects_that_begin_after_the_probed_steps_are_named(tmp_path: Path) -> None:
    steps = ("training.steps=14", "measure.warmup_steps=2", "measure.probed_steps=2")
    outcome = planted(tmp_path, ("ddp", "zero3"), LATER, *steps)
    assert named(outcome) == {
        ("memory-grows", "leaking-later"), ("memory-spikes", "spiking"), ("memory-differs", "hiding"),
    }  # fmt: skip
    for difference in _of(outcome, "memory-differs", "hiding")["differences"]:
        copy = difference["measured_bytes"] - difference["expected_bytes"]
        assert copy == pytest.approx(4 * outcome.parameters("ddp"), rel=0.02)
    peaks = {name: quantities.Run.of(outcome.records[name]).rank_peaks for name in ("ddp", "hiding")}
    assert peaks["hiding"][0] - peaks["ddp"][0] == pytest.approx(4 * outcome.parameters("ddp"), rel=0.1)
    growth = _of(outcome, "memory-grows", "leaking-later")["bytes_per_step_by_rank"]
    assert growth == {"0": pytest.approx(LEAKED_BYTES, rel=0.35), "1": pytest.approx(LEAKED_BYTES, rel=0.35)}
    spike = _of(outcome, "memory-spikes", "spiking")
    assert (spike["rank"], spike["step"]) == (1, 7)
    assert 0 < spike["peak_bytes"] - HOARDED_BYTES < spike["usual_peak_bytes"]


def _of(outcome: Outcome, name: str, backend: str) -> dict[str, Any]:
    """Values of the one finding of this name about a backend."""
    (finding,) = (f for f in outcome.findings(name) if f["backends"] == [backend])
    return finding["values"]
