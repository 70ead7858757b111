"""Recognises in what libraries say that memory ran out, whichever of them asked for it."""

from __future__ import annotations

import re

from harness.safe_text import said

# The texts of CUDA and HIP runtimes, NCCL and RCCL, cuBLAS, cuDNN, cuSOLVER and cuSPARSE, torch's allocators
# of device, pinned and host memory, C++ and the kernel.
_OUT_OF_MEMORY = re.compile(
    r"\bout ?of ?memory\b"  # CUDA out of memory; HIP error: out of memory; torch.OutOfMemoryError
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
    r"|failed to (?:cuda|hip) (?:calloc|malloc|host alloc)"  # NCCL: ncclUnhandledCudaError, its last error
    r"|(?:CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_\w*ALLOC\w*"
    # not "cannot allocate memory in static TLS block", by which the loader refuses a library
    r"|(?:can't|cannot|not enough memory to|failed to) allocate (?:memory(?! in static TLS)|pinned)"
    r"|DefaultCPUAllocator: not enough memory"
    r"|std::bad_alloc\b",
    re.IGNORECASE,
)
_CAUGHT = re.compile(r"warning\b|\bwarn\b", re.IGNORECASE)
"""A line that warns may be of memory that ran out and was found elsewhere."""
_LEAST_OF_NCCL = re.compile(r"NCCL WARN", re.IGNORECASE)


def speaks_of_out_of_memory(message: str) -> bool:
    """Whether the message of an exception says that memory ran out, on a device, pinned or of the host."""
    return _OUT_OF_MEMORY.search(message) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: what was raised says so, or what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError) or _named_so(current) or speaks_of_out_of_memory(said(current)):
            return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def line_of_out_of_memory(log: str) -> str | None:
    """The first line of a log by which memory ran out; None: no line says so.

    For a process that was killed without a word of its own: warnings of libraries that went on do not count.
    """
    for line in log.splitlines():
        is_warning = _CAUGHT.search(line) and not _LEAST_OF_NCCL.search(line)
        if not is_warning and speaks_of_out_of_memory(line):
            return line.strip()
    return None


def _named_so(error: BaseException) -> bool:
    """torch.OutOfMemoryError, without torch."""
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
