from dataclasses import dataclass

import pytest

from harness.rank.probes.memory import NoAllocatorProbe
from harness.rank.probes.process_memory import driver_use, process_memory


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
        (Driver(Process(8, None)), "does not tell the memory of a process"),
        (Driver(device="GPU-other"), "NVML: Not Found"),
    ],
)
def test_an_unknown_figure_says_why(library: object, reason: str) -> None:
    use = driver_use(library, "uuid", 8)
    assert use.used_bytes is None
    assert reason in str(use.unknown)


def test_without_cuda_only_the_host_is_read() -> None:
    figures = process_memory(NoAllocatorProbe())
    assert list(figures) == ["host_resident_bytes"]
    assert figures["host_resident_bytes"] > 0
