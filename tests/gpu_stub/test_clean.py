"""The clean matrix: every backend in every precision on devices of the stub equals the reference."""

from __future__ import annotations

import pytest

from harness.compare.metrics import BY_KEY
from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import HYBRID, PRECISIONS, UNSUPPORTED, clean_comparison, findings, labels

FOUR_RANKS = [*HYBRID, "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1", "accelerate-fsdp"]
"""One of each way to shard; reports/gpu-stub has all of them."""
PARITY = {"fp32": {"exact", "tight"}, "bf16-mixed": {"exact", "tight", "band"}}
PARITY["fp16-mixed"] = PARITY["bf16-mixed"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("nproc", [2, 4])
def test_a_clean_matrix_equals_the_reference(nproc: int, precision: str, machine: Machine) -> None:
    comparison = clean_comparison(machine, nproc, precision, labels() if nproc == 2 else FOUR_RANKS)
    rows = {row.record.backend.label: row for row in comparison.rows}
    reasons = {label: row.record.reasons for label, row in rows.items() if row.record.status == "unsupported"}
    assert reasons.keys() == {label for label, size in UNSUPPORTED if size == nproc and label in rows}
    assert all(
        len(found) == 1 and found[0].startswith(UNSUPPORTED[label, nproc]) for label, found in reasons.items()
    )
    ran = {label: row for label, row in rows.items() if label not in reasons}
    assert {label: row.record.error for label, row in ran.items() if row.record.status != "ok"} == {}
    assert [(found.id, found.message) for found in findings(comparison)] == []
    assert {row.judgement.parity for row in ran.values()} <= PARITY[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("nproc", [2, 4])
def test_states_and_bytes_equal_the_closed_forms(nproc: int, precision: str, machine: Machine) -> None:
    comparison = clean_comparison(machine, nproc, precision, labels() if nproc == 2 else FOUR_RANKS)
    wrong = {}
    for row in comparison.rows:
        if row.record.status != "ok" or row.record.world.world_size == 1:
            continue
        counted = {
            measured: [BY_KEY[key].read(row.run, row.judgement) for key in (measured, expected)]
            for measured, expected in (
                ("model_state_bytes", "expected_model_state_bytes"),
                ("sent_bytes_per_step", "expected_sent_bytes_per_step"),
            )
        }
        measured, expected = counted["sent_bytes_per_step"]
        if expected is None and "zero3" in row.label:  # its first steps fetch as they find it
            counted["sent_bytes_per_step"] = [measured, measured]
        if any(None in pair or pair[0] != pair[1] for pair in counted.values()):
            wrong[row.label] = counted
    assert wrong == {}


def test_no_speed_is_told_of_a_device_on_which_no_kernel_runs(machine: Machine) -> None:
    comparison = clean_comparison(machine, 2, "fp32", labels())
    assert all(row.run.tokens_per_second is None for row in comparison.rows)
    assert all(row.run.step_seconds == [] for row in comparison.rows)
