"""Messages by which memory ran out, as libraries word them."""

import pytest

from harness.run_directory.events import (
    is_out_of_memory,
    line_of_out_of_memory,
    speaks_of_out_of_memory,
)

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 19.07 MiB",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.29.7\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "[Errno 12] Cannot allocate memory",
    "std::bad_alloc",
]  # fmt: skip
OTHERS = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "NCCL error: unhandled system error, ncclSystemError: System call (e.g. socket, malloc) failed",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)",
    "no memory format was given",
    "libgomp.so.1: cannot allocate memory in static TLS block",
]  # fmt: skip


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
def test_what_libraries_say_of_memory_that_ran_out(message: str) -> None:
    assert speaks_of_out_of_memory(message)
    assert is_out_of_memory(RuntimeError(message))
    assert line_of_out_of_memory(f"step 3\n{message}\nAborted") is not None


@pytest.mark.parametrize("message", OTHERS)
def test_other_errors_are_not_of_memory(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))
    assert line_of_out_of_memory(message) is None


def test_the_kind_says_it_too() -> None:
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    assert is_out_of_memory(kind("no words"))
    assert is_out_of_memory(MemoryError())


def test_an_error_raised_from_it_is_one() -> None:
    error = ValueError("the engine cannot be closed")
    error.__context__ = RuntimeError("CUDA out of memory")
    assert is_out_of_memory(error)
    error.__suppress_context__ = True
    assert not is_out_of_memory(error)


def test_warnings_of_a_program_that_went_on_do_not_count() -> None:
    assert line_of_out_of_memory("UserWarning: CUDA out of memory, a smaller block is taken") is None
    assert line_of_out_of_memory("node1:7:9 [0] NCCL WARN Cuda failure 2 'out of memory'") is not None
