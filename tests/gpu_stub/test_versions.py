"""Versions of driver and libraries, and what NCCL is told, in the record of a run on CUDA."""

from __future__ import annotations

import torch

from tests.gpu_stub.machine import Machine


def test_the_record_holds_versions_and_settings_of_the_libraries(machine: Machine) -> None:
    record = machine.run("ddp")
    software = record.environment.accelerator
    assert software is not None
    assert software.cuda == torch.version.cuda
    assert software.nccl == ".".join(map(str, torch.cuda.nccl.version()))
    assert software.driver is None  # the stub is no driver
    assert software.float32_matmul == "highest"
    assert record.observed is not None
    assert record.observed.tf32 is False
