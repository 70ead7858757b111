"""Memory of this process beyond torch's allocator: resident set, driver, pinned and reserved bytes."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import torch

from harness.rank.probes.device_memory import AllocatorProbe, CudaAllocatorProbe


@dataclass(frozen=True, kw_only=True)
class DriverUse:
    """Memory of a device in use as the driver counts it, contexts and NCCL's buffers included."""

    used_bytes: int | None = None
    of: Literal["process", "device"] | None = None
    """Whose memory it is: of this process, or of all programs on the device. None: not known."""
    unknown: str | None = None
    """Why the figure is not that of this process alone."""


def process_memory(allocator: AllocatorProbe) -> dict[str, Any]:
    """Fields of `record.MemoryPart`; device figures are left out without CUDA."""
    figures: dict[str, Any] = {"host_resident_bytes": psutil.Process().memory_info().rss}
    if isinstance(allocator, CudaAllocatorProbe):
        figures |= allocator.held_bytes()
        driver = device_use(allocator)
        figures["num_alloc_retries"] = allocator.allocation_retries()
        figures["device_used_bytes"] = driver.used_bytes
        figures["device_used_of"] = driver.of
        figures["device_used_unknown"] = driver.unknown
        figures["pinned_bytes"] = pinned_bytes()
    return figures


def pinned_bytes() -> int | None:
    """Page-locked host memory in use by torch, rounded as torch allocates it; None before torch 2.7."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None:
        return None
    current = statistics().get("active_bytes.current")
    return None if current is None else int(current)


def device_use(allocator: CudaAllocatorProbe) -> DriverUse:
    """What the driver says of this process, or of its device where it cannot tell processes apart.

    A rank has its device to itself, as `require_own_devices` checks, so that the device's figure is the
    rank's, unless a program that is not of this run uses the device too.
    """
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    own = driver_use(nvml(), uuid, os.getpid())
    if own.used_bytes is not None:
        return own
    free, total = allocator.device_bytes()
    return DriverUse(used_bytes=total - free, of="device", unknown=own.unknown)


def device_handle(library: Any, uuid: str) -> Any:
    """NVML's handle of the device, or of the MIG instance, that CUDA names by this UUID. Raises NVMLError."""
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def driver_use(library: Any, uuid: str, process_id: int) -> DriverUse:
    """Ask NVML what a process that computes on a device uses there.

    library: pynvml after `nvmlInit`, or a sentence why there is none. The driver numbers processes as the
    machine does; in a container with process ids of its own it names others, or none at all.
    """
    if isinstance(library, str):
        return DriverUse(unknown=library)
    try:
        handle = device_handle(library, uuid)
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError as error:
        return DriverUse(unknown=f"NVML: {error}")
    own = [process for process in processes if process.pid == process_id]
    if not own:
        # This process computes on the device, so the driver knows it by another number.
        return DriverUse(
            unknown=f"the driver names {len(processes)} processes on this device, none with this process's "
            "id, as in a container with process ids of its own"
        )
    if own[0].usedGpuMemory is None:
        return DriverUse(unknown="the driver does not report the memory of a process on this device")
    return DriverUse(used_bytes=int(own[0].usedGpuMemory), of="process")


@cache
def nvml() -> Any:
    """The NVML library, ready to be asked, or a sentence why it cannot be had."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed (extra `nvml`)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return pynvml


STATUS = Path("/proc/self/status")
INTERVAL_SECONDS = 0.005


def anonymous_bytes() -> int | None:
    """Resident memory that is not backed by a file; None where the system does not tell.

    Mapped pages of a file of weights are left out: they are the system's cache, once for all ranks.
    """
    kib = status_value("RssAnon")
    return None if kib is None else int(kib) * 1024


def status_value(name: str) -> str | None:
    """The first word that the kernel says of this process under a name; None where it does not tell."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)


class HostPeak:
    """Samples `anonymous_bytes` from a thread; a peak shorter than the interval may be missed."""

    def __init__(self) -> None:
        self.before_bytes = anonymous_bytes()
        self.peak_bytes = self.before_bytes
        self.after_bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> HostPeak:
        if self.before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self.before_bytes is not None:
            self._thread.join()
            self.note()
        self.after_bytes = anonymous_bytes()

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            self.note()

    def note(self) -> None:
        """Take the memory of this moment into account."""
        self.peak_bytes = max(self.peak_bytes or 0, anonymous_bytes() or 0)
