from collections.abc import Iterator
from itertools import chain, count, repeat

import torch

from harness.worker.memory import (
    MOST_READINGS,
    CpuAllocatorProbe,
    LiveBytes,
    NoAllocatorProbe,
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
    return live_bytes_by_kind(tensors, NoAllocatorProbe()).inside


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
    assert live_bytes_by_kind([], NoAllocatorProbe()) == LiveBytes(inside=None, outside=None)


def test_freed_storage_counts_nothing() -> None:
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    assert inside([("gathered", freed), ("weights", torch.zeros(1))]) == {"weights": 4}


def test_without_a_counter_every_figure_is_unknown() -> None:
    probe = NoAllocatorProbe()
    assert (probe.allocated_bytes(), probe.peak_bytes(), probe.reserved_peak_bytes()) == (None, None, None)


def test_host_peak_is_at_least_what_was_touched() -> None:
    held = torch.ones(8_000_000)
    assert host_peak_bytes() > held.numel() * 4


def test_settling_waits_for_a_thread_that_still_holds_what_it_sent() -> None:
    probe = Readings(chain([900, 900, 900, 500], repeat(100)))
    probe.settle()
    assert probe.allocated_bytes() == 100


def test_settling_ends_where_nothing_settles() -> None:
    changing = Readings(count())
    changing.settle()
    assert changing.allocated_bytes() == MOST_READINGS + 1
