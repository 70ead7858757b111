"""The machine itself: what torch finds on it, and the faults that it can be given."""

from __future__ import annotations

import pytest

from tests.gpu_stub.machine import Machine

LITTLE = {"CUDA_STUB_MEMORY_BYTES": str(2**20)}


def test_a_run_says_that_its_device_is_a_stub(machine: Machine) -> None:
    record = machine.run("ddp")
    assert record.status == "ok", record.error
    assert record.world.device == "cuda"
    assert record.world.collectives == "nccl"
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub"}


def test_a_name_that_is_asked_for_still_says_so(machine: Machine) -> None:
    record = machine.run("ddp", environment={"CUDA_STUB_NAME": "NVIDIA A100-SXM4-80GB"})
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub NVIDIA A100-SXM4-80GB"}


def test_memory_beyond_the_device_is_out_of_memory(machine: Machine) -> None:
    record = machine.run("ddp", environment=LITTLE)
    assert record.status == "oom"
    assert record.error is not None
    assert record.error.kind == "OutOfMemoryError"


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("CUDA_STUB_NCCL_OUT_OF_MEMORY", "unhandled cuda error"),
        ("CUDA_STUB_CUBLAS_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"),
        ("CUDA_STUB_NCCL_ERROR", ""),
    ],
)
def test_a_library_that_fails_ends_the_run(variable: str, words: str, machine: Machine) -> None:
    """What kind of failure the record should call it is tested by others; here, that the fault strikes."""
    settings = ["runtime.timeout_seconds=60"]
    record = machine.run("ddp", settings=settings, environment={variable: "20", "CUDA_STUB_FAULT_RANK": "1"})
    assert record.status != "ok"
    assert record.error is not None
    log = machine.run_directory(record).joinpath("rank-00001.log").read_text()
    assert words in record.error.message + log


def test_the_command_line_finds_the_devices(machine: Machine) -> None:
    done = machine.harness("doctor", "--help")
    assert done.returncode == 0, done.stderr
