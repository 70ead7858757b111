"""Defects of memory, planted in real runs, are named; a clean run beside them is not."""

from __future__ import annotations

import pytest

from tests.memory.defects import HOARDED_BYTES, LEAKED_BYTES
from tests.memory.runs import LLAMA, Outcome, compare

MEMORY = {"memory-differs", "memory-grows", "memory-imbalance", "one-wrap-unit"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    planted = {"one-unit": "OneUnit", "leaking": "Leaking", "hoarding": "Hoarding"}
    points = {name: f"tests.memory.defects:{target}" for name, target in planted.items()}
    folder = tmp_path_factory.mktemp("defects")
    names = ",".join(("ddp", "fsdp", *planted))
    return compare(folder, names, 2, f"model.config={LLAMA}", entry_points=points)


def test_every_run_ended_well(outcome: Outcome) -> None:
    names = {"single", "ddp", "fsdp", "one-unit", "leaking", "hoarding"}
    assert names <= set(outcome.records)
    assert {record.status for record in outcome.records.values()} == {"ok"}


def test_each_defect_is_named_and_nothing_else(outcome: Outcome) -> None:
    found = {(f["id"], *f["backends"]) for f in outcome.document["findings"] if f["id"] in MEMORY}
    assert found == {
        ("one-wrap-unit", "one-unit"),
        ("memory-grows", "leaking"),
        ("memory-imbalance", "hoarding"),
    }


def test_the_leak_has_its_size(outcome: Outcome) -> None:
    (finding,) = outcome.findings("memory-grows")
    assert finding["values"]["bytes_per_step_by_rank"] == {"0": LEAKED_BYTES, "1": LEAKED_BYTES}


def test_one_unit_gathers_the_whole_model(outcome: Outcome) -> None:
    (finding,) = outcome.findings("one-wrap-unit")
    record = outcome.records["one-unit"]
    assert record.model is not None
    whole = 4 * record.model["parameters"]
    assert finding["values"]["wrap_units"] == 0
    assert whole <= finding["values"]["gathered_peak_bytes"] <= 1.01 * whole


def test_a_unit_per_block_gathers_less(outcome: Outcome) -> None:
    peaks = [m.gathered_peak_bytes or 0 for r in outcome.records["fsdp"].ranks for m in r.memory]
    record = outcome.records["fsdp"]
    assert record.model is not None
    assert 0 < max(peaks) < 0.75 * 4 * record.model["parameters"]


def test_the_hoard_has_its_size(outcome: Outcome) -> None:
    (finding,) = outcome.findings("memory-imbalance")
    first, last = finding["values"]["peak_bytes_by_rank"]
    assert last - first == pytest.approx(HOARDED_BYTES, rel=0.01)
