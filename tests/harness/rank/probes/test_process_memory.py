from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from harness.errors import HarnessError
from harness.rank.probes.memory import (
    AllocatorProbe,
    CudaAllocatorProbe,
    device_use,
    driver_use,
    process_memory,
)


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None  # noqa: N815 - NVML's name


class Driver:
    """What of pynvml is asked."""

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: Process, device: str = "GPU-uuid") -> None:
        self._processes, self._device = list(processes), device

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self._device:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[Process]:
        return self._processes


def test_the_drivers_figure_is_that_of_the_own_process() -> None:
    use = driver_use(Driver(Process(7, 100), Process(8, 2000)), "uuid", 8)
    assert (use.used_bytes, use.of, use.unknown) == (2000, "process", None)


def test_a_mig_instance_is_asked_by_its_own_name() -> None:
    use = driver_use(Driver(Process(8, 2000), device="MIG-uuid"), "uuid", 8)
    assert use.used_bytes == 2000


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("nvidia-ml-py is not installed", "nvidia-ml-py is not installed"),
        (Driver(Process(7, 100)), "names 1 processes on this device, none with this process's id"),
        (Driver(), "names 0 processes"),
        (Driver(Process(8, None)), "does not report the memory of a process"),
        (Driver(device="GPU-other"), "NVML: Not Found"),
    ],
)
def test_an_unknown_figure_says_why(library: object, reason: str) -> None:
    use = driver_use(library, "uuid", 8)
    assert use.used_bytes is None
    assert reason in str(use.unknown)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A device of 100 bytes with 30 free, of which the allocator holds 20; returns what was set of it."""
    done: dict[str, float] = {}
    properties = SimpleNamespace(uuid="uuid", total_memory=100)
    for name, value in (
        ("current_device", 0), ("get_device_properties", properties), ("mem_get_info", (30, 100)),
        ("memory_reserved", 20),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: done.update(share=share))
    monkeypatch.setattr("harness.rank.probes.memory.nvml", lambda: Driver(Process(7, 100)))
    return done


def test_where_a_container_hides_the_process_the_devices_figure_is_taken(device: dict[str, float]) -> None:
    use = device_use()
    assert (use.used_bytes, use.of) == (70, "device")
    assert "process ids of its own" in str(use.unknown)


def test_a_limit_is_of_device_memory_context_and_nccl_included(device: dict[str, float]) -> None:
    CudaAllocatorProbe().limit(80)  # 50 are neither free nor the allocator's
    assert device == {"share": 0.3}
    with pytest.raises(HarnessError, match="the device has 100"):
        CudaAllocatorProbe().limit(101)


def test_without_cuda_only_the_host_is_read() -> None:
    figures = process_memory(AllocatorProbe())
    assert list(figures) == ["host_resident_bytes"]
    assert figures["host_resident_bytes"] > 0
