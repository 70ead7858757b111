"""What allocators serve, what drivers say of a process, and live bytes by kind at the moments of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.errors import HarnessError
from harness.rank.probes import memory


class Readings(memory.CpuAllocatorProbe):
    """An allocator of which each reading is known."""

    def __init__(self, readings: Iterator[int]) -> None:
        self._readings = readings

    def allocated_bytes(self) -> int:
        return next(self._readings)


def resized(tensor: Tensor, size: int) -> Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


HUNDRED = torch.zeros(100)


@pytest.mark.parametrize(
    ("live", "kinds"),
    [
        ([("weights", HUNDRED), ("gathered", HUNDRED[:50]), ("weights", HUNDRED.view(10, 10))],
         {"weights": 400}),
        ([("gradients", torch.zeros(100)[:1])], {"gradients": 400}),
        ([("weights", torch.zeros(2)), ("optimizer", torch.zeros(3)), ("optimizer", torch.zeros(4))],
         {"weights": 8, "optimizer": 28}),
        ([("gathered", resized(torch.zeros(10), 0)), ("weights", torch.zeros(1))], {"weights": 4}),
        ([], None),  # no tensor is not zero bytes but unknown
    ],
)  # fmt: skip
def test_each_storage_counts_once_and_whole_under_its_first_kind(
    live: list[tuple[str, Tensor]], kinds: dict[str, int] | None
) -> None:
    assert memory.live_bytes_by_kind(live, memory.AllocatorProbe()) == memory.LiveBytes(
        inside=kinds, outside=None
    )


def test_without_a_counter_every_figure_is_unknown() -> None:
    probe = memory.AllocatorProbe()
    figures = (probe.allocated_bytes, probe.peak_bytes, probe.reserved_peak_bytes, probe.allocation_retries)
    assert [figure() for figure in figures] == [None] * 4
    with pytest.raises(HarnessError, match=r"install a C\+\+ compiler"):
        probe.limit(1)
    assert memory.process_memory(probe).keys() == {"host_resident_bytes"}
    assert memory.process_memory(probe)["host_resident_bytes"] > 0


def test_host_peak_is_at_least_what_was_touched() -> None:
    held = torch.ones(8_000_000)
    assert memory.host_peak_bytes() > held.numel() * 4


def test_readings_wait_for_a_thread_that_still_holds_what_it_sent() -> None:
    probe = Readings(chain([900, 900, 900, 500], repeat(100)))
    probe.wait_until_stable()
    assert probe.allocated_bytes() == 100


def test_readings_end_even_if_memory_never_stops_changing() -> None:
    changing = Readings(count())
    changing.wait_until_stable()
    assert changing.allocated_bytes() == memory.MOST_READINGS + 1


@pytest.fixture
def counting() -> Iterator[memory.CpuAllocatorProbe]:
    probe = memory.allocator_probe("cpu")
    assert isinstance(probe, memory.CpuAllocatorProbe)
    yield probe
    probe.limit(0)
    probe.relax()


def test_above_the_limit_an_allocation_fails_as_on_a_full_device(counting: memory.CpuAllocatorProbe) -> None:
    before = counting.allocated_bytes()
    counting.limit(before + 1_000_000)
    held = torch.zeros(200_000)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 400000 bytes"):
        torch.zeros(100_000)
    assert counting.allocated_bytes() == before + held.nbytes
    del held
    assert torch.zeros(250_000).nbytes == 1_000_000


def test_without_a_limit_every_allocation_succeeds(counting: memory.CpuAllocatorProbe) -> None:
    counting.limit(1)
    counting.limit(0)
    assert torch.zeros(100_000).nbytes == 400_000


def test_what_is_counted_in_passing_is_counted_too(counting: memory.CpuAllocatorProbe) -> None:
    held = torch.zeros(100_000)
    counting.relax()
    before = counting.allocated_bytes()
    counting.reset_peak()
    kept, spike = torch.zeros(50_000), torch.zeros(500_000)
    del spike
    assert counting.allocated_bytes() - before == pytest.approx(kept.nbytes, abs=256)
    assert counting.peak_bytes() - before == pytest.approx(2_200_000, abs=512)
    del held, kept
    assert counting.allocated_bytes() - before == pytest.approx(-400_000, abs=256)


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


def test_the_drivers_figure_is_that_of_the_own_process_on_a_device_or_mig_instance() -> None:
    use = memory.driver_use(Driver(Process(7, 100), Process(8, 2000)), "uuid", 8)
    assert (use.used_bytes, use.of, use.unknown) == (2000, "process", None)
    assert memory.driver_use(Driver(Process(8, 2000), device="MIG-uuid"), "uuid", 8) == use


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
    use = memory.driver_use(library, "uuid", 8)
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
    use = memory.device_use()
    assert (use.used_bytes, use.of) == (70, "device")
    assert "process ids of its own" in str(use.unknown)


def test_a_limit_is_of_device_memory_context_and_nccl_included(device: dict[str, float]) -> None:
    memory.CudaAllocatorProbe().limit(80)  # 50 are neither free nor the allocator's
    assert device == {"share": 0.3}
    with pytest.raises(HarnessError, match="the device has 100"):
        memory.CudaAllocatorProbe().limit(101)


class FakeEngine:
    """Has a weight, and gathers as many bytes as it is told to."""

    def __init__(self) -> None:
        self.gathered = 0
        self.hidden: dict[str, int] = {}

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weights", WEIGHT
        yield from (("gathered", tensor) for tensor in self.gathered_tensors())

    def gathered_tensors(self) -> Iterator[Tensor]:
        yield torch.zeros(self.gathered, dtype=torch.uint8)

    def hidden_bytes(self) -> dict[str, int]:
        return self.hidden


WEIGHT = torch.zeros(10)


def probe(engine: Any) -> memory.MemoryProbe:
    return memory.MemoryProbe(memory.AllocatorProbe(), engine)


def test_gathered_weights_are_read_at_the_end_of_each_module_with_parameters() -> None:
    engine = FakeEngine()
    held = probe(engine)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    held.begin()
    for size, layer in zip((30, 50, 40), layers, strict=True):
        engine.gathered = size
        nn.Sequential(layer)(torch.zeros(1, 2))
    engine.gathered = 500
    nn.ReLU()(torch.zeros(1))
    held.record(1, "after_forward")
    held.end()
    (row,) = held.rows
    assert (row["gathered_least_bytes"], row["gathered_peak_bytes"]) == (30, 50)


def test_recomputation_in_the_backward_pass_is_no_forward_pass() -> None:
    engine = FakeEngine()
    held = probe(engine)
    held.begin()
    engine.gathered = 30
    output = checkpoint(nn.Linear(2, 2), torch.zeros(1, 2), use_reentrant=False)
    held.record(1, "after_forward")
    engine.gathered = 90
    output.sum().backward()
    held.record(1, "after_backward")
    held.end()
    assert [row["gathered_peak_bytes"] for row in held.rows] == [30, None]


def test_bytes_without_tensors_count_under_their_kind() -> None:
    engine = FakeEngine()
    engine.hidden = {"communication": 7, "weights": 2}
    held = probe(engine)
    held.record(1, "after_step")
    assert held.rows[0]["kinds"] == {"weights": 42, "communication": 7}


class FreeingAllocator(memory.AllocatorProbe):
    """Serves less at every reading, as where a transport's threads free what they sent."""

    def __init__(self) -> None:
        self.served = 1000

    def allocated_bytes(self) -> int:
        self.served -= 100
        return self.served


def test_kinds_add_up_to_what_was_allocated_though_threads_free_meanwhile() -> None:
    held = memory.MemoryProbe(FreeingAllocator(), FakeEngine())
    held.record(1, "after_backward")
    (row,) = held.rows
    assert sum(row["kinds"].values()) == row["allocated_bytes"] == 900
