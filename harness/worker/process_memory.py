"""Memory of this process beyond torch's allocator: resident set, driver, pinned and reserved bytes."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import psutil
import torch

from harness.worker.memory import AllocatorProbe, CudaAllocatorProbe


def process_memory(allocator: AllocatorProbe) -> dict[str, int | None]:
    """Fields of `record.MemoryPart`; device figures are None without CUDA."""
    figures: dict[str, int | None] = {"host_resident_bytes": psutil.Process().memory_info().rss}
    if isinstance(allocator, CudaAllocatorProbe):
        figures["reserved_bytes"] = torch.cuda.memory_reserved()
        figures["device_used_bytes"] = device_used_bytes()
        figures["pinned_bytes"] = pinned_bytes()
    return figures


def pinned_bytes() -> int | None:
    """Page-locked host memory in use by torch, rounded as torch allocates it; None before torch 2.7."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None:
        return None
    current = statistics().get("active_bytes.current")
    return None if current is None else int(current)


def device_used_bytes() -> int | None:
    """Memory of this process on its device as the driver counts it, contexts and NCCL's buffers included.

    None where nvidia-ml-py is not installed, or where the driver does not tell processes apart, as in a
    container with process ids of its own.
    """
    library = _nvml()
    if library is None:
        return None
    identity = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:
        return None
    used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return int(used[0]) if used and used[0] is not None else None


@cache
def _nvml() -> Any:
    """The NVML library, ready to be asked; None where it cannot be had."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
