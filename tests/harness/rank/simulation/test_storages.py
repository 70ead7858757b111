"""Bytes of tensors without data, as an allocator would count them."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.rank.simulation.fake_tensors import CountingMode, FakeAllocatorProbe, resizes_noted

ROW = 1000 * 4


def test_a_storage_counts_from_its_operator_until_its_last_view_is_gone() -> None:
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe):
        whole = torch.zeros(3, 1000)
        view = whole[1]
        assert probe.allocated_bytes() == 3 * ROW
        del whole
        assert probe.allocated_bytes() == 3 * ROW
        del view
    assert (probe.allocated_bytes(), probe.peak_bytes()) == (0, 3 * ROW)


def test_the_peak_includes_what_an_operator_returned_and_was_dropped() -> None:
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe):
        row = torch.zeros(1000)
        row = row + 1
        probe_after = (probe.allocated_bytes(), probe.peak_bytes())
        probe.reset_peak()
        row.add_(1)
    assert probe_after == (ROW, 2 * ROW)
    assert probe.peak_bytes() == ROW


def test_a_storage_that_is_freed_by_resizing_no_longer_counts() -> None:
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe), resizes_noted(probe):
        row = torch.zeros(1000)
        row.untyped_storage().resize_(0)
        assert probe.allocated_bytes() == 0
        row.untyped_storage().resize_(ROW)
        assert probe.allocated_bytes() == ROW


def test_activations_live_until_the_backward_pass() -> None:
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe):
        weight = torch.zeros(1000, requires_grad=True)
        loss = (weight.exp() * 2).sum()
        assert probe.allocated_bytes() == 2 * ROW + 4
        loss.backward()
        assert probe.allocated_bytes() == 2 * ROW + 4  # the gradient is there, the activation is not


def test_values_that_are_not_there_are_zero_and_no_overflow() -> None:
    with FakeTensorMode(), CountingMode(FakeAllocatorProbe()):
        assert float(torch.ones(()).sqrt()) == 0.0
        assert not bool(torch.zeros(3).isnan().any())
    with FakeTensorMode(), CountingMode(FakeAllocatorProbe()):
        assert int(torch.tensor(7)) == 7  # a constant is known


def test_tensors_that_lie_nowhere_do_not_count() -> None:
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe):
        row = torch.zeros(1000, device="meta")
        assert row.numel() == 1000
        assert probe.allocated_bytes() == 0


def test_the_first_cpu_is_the_cpu() -> None:
    with FakeTensorMode(), CountingMode(FakeAllocatorProbe()):
        assert (torch.zeros(3, device="cpu:0") + torch.zeros(3, device="cpu")).shape == (3,)
