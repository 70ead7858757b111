from collections.abc import Iterator
from itertools import chain, count, repeat

import pytest
import torch

from harness.errors import HarnessError
from harness.rank.probes.memory import (
    MOST_READINGS,
    AllocatorProbe,
    CpuAllocatorProbe,
    LiveBytes,
    allocator_probe,
    host_peak_bytes,
    live_bytes_by_kind,
)


class Readings(CpuAllocatorProbe):
    """An allocator of which each reading is known."""

    def __init__(self, readings: Iterator[int]) -> None:
        self._readings = readings

    def allocated_bytes(self) -> int:
        return next(self._readings)


def inside(tensors) -> dict[str, int] | None:
    return live_bytes_by_kind(tensors, AllocatorProbe()).inside


def test_each_storage_counts_once_under_its_first_kind() -> None:
    tensor = torch.zeros(100)
    live = [("weights", tensor), ("gathered", tensor[:50]), ("weights", tensor.view(10, 10))]
    assert inside(live) == {"weights": 400}


def test_a_view_counts_its_whole_storage() -> None:
    assert inside([("gradients", torch.zeros(100)[:1])]) == {"gradients": 400}


def test_kinds_are_summed_apart() -> None:
    live = [("weights", torch.zeros(2)), ("optimizer", torch.zeros(3)), ("optimizer", torch.zeros(4))]
    assert inside(live) == {"weights": 8, "optimizer": 28}


def test_no_tensor_is_not_zero_bytes_but_unknown() -> None:
    assert live_bytes_by_kind([], AllocatorProbe()) == LiveBytes(inside=None, outside=None)


def test_freed_storage_counts_nothing() -> None:
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    assert inside([("gathered", freed), ("weights", torch.zeros(1))]) == {"weights": 4}


def test_without_a_counter_every_figure_is_unknown() -> None:
    probe = AllocatorProbe()
    assert (probe.allocated_bytes(), probe.peak_bytes(), probe.reserved_peak_bytes()) == (None, None, None)


def test_host_peak_is_at_least_what_was_touched() -> None:
    held = torch.ones(8_000_000)
    assert host_peak_bytes() > held.numel() * 4


def test_readings_wait_for_a_thread_that_still_holds_what_it_sent() -> None:
    probe = Readings(chain([900, 900, 900, 500], repeat(100)))
    probe.wait_until_stable()
    assert probe.allocated_bytes() == 100


def test_readings_end_even_if_memory_never_stops_changing() -> None:
    changing = Readings(count())
    changing.wait_until_stable()
    assert changing.allocated_bytes() == MOST_READINGS + 1


@pytest.fixture
def counting() -> Iterator[CpuAllocatorProbe]:
    probe = allocator_probe("cpu")
    assert isinstance(probe, CpuAllocatorProbe)
    yield probe
    probe.limit(0)
    probe.relax()


def test_above_the_limit_an_allocation_fails_as_on_a_full_device(counting: CpuAllocatorProbe) -> None:
    before = counting.allocated_bytes()
    counting.limit(before + 1_000_000)
    held = torch.zeros(200_000)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 400000 bytes"):
        torch.zeros(100_000)
    assert counting.allocated_bytes() == before + held.nbytes
    del held
    assert torch.zeros(250_000).nbytes == 1_000_000


def test_without_a_limit_every_allocation_succeeds(counting: CpuAllocatorProbe) -> None:
    counting.limit(1)
    counting.limit(0)
    assert torch.zeros(100_000).nbytes == 400_000


def test_what_is_counted_in_passing_is_counted_too(counting: CpuAllocatorProbe) -> None:
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


def test_a_limit_that_nothing_holds_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"install a C\+\+ compiler"):
        AllocatorProbe().limit(1)


def test_the_cpu_keeps_no_cache_to_free() -> None:
    assert AllocatorProbe().allocation_retries() is None
