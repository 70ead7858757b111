"""Settings whose code differs on CUDA: offload, checkpoints, accumulation, recomputation."""

from __future__ import annotations

import pytest

from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import findings

OFFLOAD = ("zero2:offload=optimizer", "zero3:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu")


def test_offloaded_states_train_alike_and_leave_the_device(machine: Machine) -> None:
    comparison = machine.compare(["zero2", "zero3", "fsdp", *OFFLOAD])
    rows = {row.record.backend.label: row for row in comparison.rows}
    assert {label: rows[label].record.error for label in OFFLOAD if rows[label].record.status != "ok"} == {}
    assert [(found.id, found.message) for found in findings(comparison)] == []
    for label in OFFLOAD:
        native = rows[label.partition(":")[0]]
        assert max(rows[label].run.rank_peaks) < max(native.run.rank_peaks)


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero3", "fsdp", "fsdp1"])
def test_a_checkpoint_restores_what_was_saved(label: str, machine: Machine) -> None:
    record = machine.run(label, 2, ["measure.checkpoint=true"])
    assert record.status == "ok", record.error
    assert any(part.moment == "during_checkpoint" for part in record.ranks[0].memory)


@pytest.mark.parametrize(
    "setting", ["training.accumulation_steps=2", "training.activation_checkpointing=true"]
)
def test_accumulation_and_recomputation_equal_the_reference(setting: str, machine: Machine) -> None:
    comparison = machine.compare(["ddp", "zero2", "zero3", "fsdp", "fsdp1"], 2, [setting])
    assert [(found.id, found.message) for found in findings(comparison)] == []
    assert {row.judgement.parity for row in comparison.rows} <= {"exact", "tight"}


def test_the_same_run_twice_gives_the_same_bits(machine: Machine) -> None:
    once, again = (machine.run("fsdp", repeat=repeat) for repeat in (0, 1))
    assert once.final_weights is not None
    assert again.final_weights is not None
    assert once.final_weights.digest == again.final_weights.digest
