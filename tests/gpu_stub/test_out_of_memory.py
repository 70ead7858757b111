"""Memory that runs out is recorded as that, with the rank, whichever library asked for it."""

from __future__ import annotations

import pytest

from tests.gpu_stub.machine import Machine
from tests.representatives import first

CASES = [
    ("ddp", "CUDA_STUB_MEMORY_BYTES", str(2**20), "CUDA out of memory"),
    ("ddp", "CUDA_STUB_NCCL_OUT_OF_MEMORY", "20", "unhandled cuda error"),
    ("fsdp", "CUDA_STUB_CUBLAS_OUT_OF_MEMORY", "1", "CUBLAS_STATUS_ALLOC_FAILED"),
    ("zero2:offload=cpu", "CUDA_STUB_PINNED_BYTES", "1024", "out of memory"),
]
STRUCK = {"CUDA_STUB_FAULT_RANK": "1"}


@pytest.mark.parametrize(
    ("backend", "variable", "value", "said"),
    first(CASES[1:3], CASES),
)
def test_a_rank_out_of_memory(backend: str, variable: str, value: str, said: str, machine: Machine) -> None:
    record = machine.run(backend, environment={variable: value, **STRUCK})
    assert record.error is not None
    assert (record.status, record.error.rank) == ("oom", 1), record.error
    assert said in record.error.message


def test_memory_beyond_the_limit_of_a_job_is_not_served(machine: Machine) -> None:
    """`runtime.memory_limit` ends a rank on CUDA as a full device does."""
    record = machine.run("ddp", settings=["runtime.memory_limit=1MB"])
    assert (record.status, record.world.memory_limit_bytes) == ("oom", 10**6), record.error
    assert record.error is not None
    assert "CUDA out of memory" in record.error.message
