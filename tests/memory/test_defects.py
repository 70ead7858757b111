"""Defects of memory, planted in real runs, are named; a clean run beside them is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.memory.defects import HOARDED_BYTES, LEAKED_BYTES
from tests.memory.runs import LLAMA, Outcome, compare

pytestmark = [pytest.mark.long(seconds=20), pytest.mark.costly]
"""`tests/harness/judge/findings/test_memory.py` finds each in a record without ranks."""

MEMORY = {"memory-differs", "memory-grows", "memory-spikes", "memory-imbalance", "one-wrap-unit"}
LATER = {"leaking-later": "LeakingLater", "spiking": "Spiking"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    planted = {
        "one-unit": "OneUnit",
        "one-unit-listed": "OneUnitListed",
        "leaking": "Leaking",
        "leaking-at-times": "LeakingEverySecondStep",
        "hoarding": "Hoarding",
    }
    points = {name: f"tests.memory.defects:{target}" for name, target in planted.items()}
    folder = tmp_path_factory.mktemp("defects")
    names = ",".join(("ddp", "fsdp", "fsdp-grad-op", *planted))
    # Five probed steps tell a leak in every second one from a single allocation.
    steps = ("training.steps=6", "measure.probed_steps=5")
    return compare(folder, names, 2, f"model.config={LLAMA}", *steps, entry_points=points)


def test_every_run_ended_well(outcome: Outcome) -> None:
    names = {"single", "ddp", "fsdp", "fsdp-grad-op", "one-unit", "one-unit-listed", "leaking", "hoarding"}
    assert names | {"leaking-at-times"} <= set(outcome.records)
    assert {record.status for record in outcome.records.values()} == {"ok"}


def test_each_defect_is_named_and_nothing_else(outcome: Outcome) -> None:
    found = {(f["id"], *f["backends"]) for f in outcome.document["findings"] if f["id"] in MEMORY}
    assert found == {
        ("one-wrap-unit", "one-unit"),
        ("one-wrap-unit", "one-unit-listed"),
        ("memory-grows", "leaking"),
        ("memory-grows", "leaking-at-times"),
        ("memory-imbalance", "hoarding"),
    }


def test_the_leak_has_its_size(outcome: Outcome) -> None:
    always, at_times = (_of(outcome, "memory-grows", name) for name in ("leaking", "leaking-at-times"))
    assert always["bytes_per_step_by_rank"] == {"0": LEAKED_BYTES, "1": LEAKED_BYTES}
    for size in at_times["bytes_per_step_by_rank"].values():
        assert size == pytest.approx(LEAKED_BYTES / 2, rel=0.35)


@pytest.mark.parametrize(("name", "listed"), [("one-unit", 0), ("one-unit-listed", 3)])
def test_one_unit_gathers_the_whole_model(outcome: Outcome, name: str, listed: int) -> None:
    values = _of(outcome, "one-wrap-unit", name)
    record = outcome.records[name]
    assert record.model is not None
    whole = 4 * record.model.parameters
    assert values["wrap_units"] == listed
    assert whole <= values["gathered_least_bytes"] <= values["gathered_peak_bytes"] <= 1.01 * whole


def test_a_unit_per_block_gathers_less(outcome: Outcome) -> None:
    peaks = [m.gathered_peak_bytes or 0 for r in outcome.records["fsdp"].ranks for m in r.memory]
    record = outcome.records["fsdp"]
    assert record.model is not None
    assert 0 < max(peaks) < 0.75 * 4 * record.model.parameters


def test_the_hoard_has_its_size(outcome: Outcome) -> None:
    (finding,) = outcome.findings("memory-imbalance")
    first, last = finding["values"]["peak_bytes_by_rank"]
    assert last - first == pytest.approx(HOARDED_BYTES, rel=0.01)


def test_defects_that_begin_after_the_probed_steps_are_named(tmp_path: Path) -> None:
    points = {name: f"tests.memory.defects:{target}" for name, target in LATER.items()}
    steps = ("training.steps=14", "measure.probed_steps=2", f"model.config={LLAMA}")
    outcome = compare(tmp_path, ",".join(("ddp", "zero3", *points)), 2, *steps, entry_points=points)
    assert {(f["id"], *f["backends"]) for f in outcome.document["findings"] if f["id"] in MEMORY} == {
        ("memory-grows", "leaking-later"), ("memory-spikes", "spiking"),
    }  # fmt: skip
    growth = _of(outcome, "memory-grows", "leaking-later")["bytes_per_step_by_rank"]
    assert growth == {"0": pytest.approx(LEAKED_BYTES, rel=0.35), "1": pytest.approx(LEAKED_BYTES, rel=0.35)}
    spike = _of(outcome, "memory-spikes", "spiking")
    assert (spike["rank"], spike["step"]) == (1, 7)
    assert 0 < spike["peak_bytes"] - HOARDED_BYTES < spike["usual_peak_bytes"]


def _of(outcome: Outcome, name: str, backend: str) -> dict[str, Any]:
    """Values of the one finding of this name about a backend."""
    (finding,) = (f for f in outcome.findings(name) if f["backends"] == [backend])
    return finding["values"]
