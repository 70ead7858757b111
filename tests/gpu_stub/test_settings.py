"""Settings whose code differs on CUDA: offload, accumulation, recomputation."""

from __future__ import annotations

import pytest

from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import findings
from tests.representatives import EXHAUSTIVE

OFFLOAD = ("zero2:offload=optimizer", "zero3:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu")


def test_offloaded_states_train_alike_and_leave_the_device(machine: Machine) -> None:
    comparison = machine.compare(["zero2", "zero3", "fsdp", *OFFLOAD])
    rows = {row.record.backend.label: row for row in comparison.rows}
    assert {label: rows[label].record.error for label in OFFLOAD if rows[label].record.status != "ok"} == {}
    assert [(found.id, found.message) for found in findings(comparison)] == []
    for label in OFFLOAD:
        native = rows[label.partition(":")[0]]
        assert max(rows[label].run.rank_peaks) < max(native.run.rank_peaks)


@EXHAUSTIVE
@pytest.mark.parametrize(
    "setting", ["training.accumulation_steps=2", "training.activation_checkpointing=true"]
)
def test_accumulation_and_recomputation_equal_the_reference(setting: str, machine: Machine) -> None:
    comparison = machine.compare(["ddp", "zero2", "zero3", "fsdp", "fsdp1"], 2, [setting])
    assert [(found.id, found.message) for found in findings(comparison)] == []
    assert {row.judgement.parity for row in comparison.rows} <= {"exact", "tight"}
