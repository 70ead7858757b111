"""The code of AdamW that runs on CUDA is read back from the live optimizer of every library."""

from __future__ import annotations

import pytest

from harness.forms.optimizers import implementation
from harness.record.workload import of_record
from tests.gpu_stub.machine import Machine
from tests.representatives import first


@pytest.mark.parametrize(
    "label", first(["zero3", "fsdp"], ["ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-fsdp"])
)
def test_the_closed_form_takes_the_implementation_in_force(label: str, machine: Machine) -> None:
    record = machine.run(label)
    effective, workload = record.backend.effective, of_record(record)
    assert effective is not None
    assert workload is not None
    assert effective.optimizer_implementation == implementation(workload) == "foreach"


def test_an_offloaded_update_loops_on_the_host(machine: Machine) -> None:
    record = machine.run("fsdp:offload=cpu")
    assert record.status == "ok", record.error
    assert record.backend.effective is not None
    assert record.backend.effective.optimizer_implementation == "for-loop"
