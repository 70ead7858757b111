"""Bytes of tensors without data, as an allocator would count them."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from harness.rank.simulation import Chunks, CountingMode, FakeAllocatorProbe, resizes_noted

ROW = 1000 * 4


@pytest.fixture
def probe() -> Iterator[FakeAllocatorProbe]:
    """Counts what the test makes."""
    probe = FakeAllocatorProbe()
    with FakeTensorMode(), CountingMode(probe), resizes_noted(probe):
        yield probe


def test_a_storage_counts_from_its_operator_until_its_last_view_is_gone(probe: FakeAllocatorProbe) -> None:
    whole = torch.zeros(3, 1000)
    view = whole[1]
    assert probe.allocated_bytes() == 3 * ROW
    del whole
    assert probe.allocated_bytes() == 3 * ROW
    del view
    assert (probe.allocated_bytes(), probe.peak_bytes()) == (0, 3 * ROW)


def test_the_peak_includes_what_an_operator_returned_and_was_dropped(probe: FakeAllocatorProbe) -> None:
    row = torch.zeros(1000)
    row = row + 1
    assert (probe.allocated_bytes(), probe.peak_bytes()) == (ROW, 2 * ROW)
    probe.reset_peak()
    row.add_(1)
    assert probe.peak_bytes() == ROW


def test_a_storage_that_is_freed_by_resizing_no_longer_counts(probe: FakeAllocatorProbe) -> None:
    row = torch.zeros(1000)
    for rows in (0, 1):
        row.untyped_storage().resize_(rows * ROW)
        assert probe.allocated_bytes() == rows * ROW


def test_activations_live_until_the_backward_pass(probe: FakeAllocatorProbe) -> None:
    weight = torch.zeros(1000, requires_grad=True)
    loss = (weight.exp() * 2).sum()
    assert probe.allocated_bytes() == 2 * ROW + 4
    loss.backward()
    assert probe.allocated_bytes() == 2 * ROW + 4  # the gradient is there, the activation is not


@pytest.mark.usefixtures("probe")
def test_values_that_are_not_there_are_zero_and_no_overflow() -> None:
    assert float(torch.ones(()).sqrt()) == 0.0
    assert not bool(torch.zeros(3).isnan().any())
    assert int(torch.tensor(7)) == 7  # a constant is known
    # The first CPU is the CPU.
    assert (torch.zeros(3, device="cpu:0") + torch.zeros(3, device="cpu")).shape == (3,)


def test_tensors_that_lie_nowhere_do_not_count(probe: FakeAllocatorProbe) -> None:
    assert torch.zeros(1000, device="meta").numel() == 1000
    assert probe.allocated_bytes() == 0


@pytest.mark.parametrize(("rows", "count"), [(12, 4), (13, 4), (3, 8), (9, 8), (1, 1), (1, 5)])
def test_chunks_are_those_of_torch(rows: int, count: int) -> None:
    tensor = torch.arange(rows * 3).reshape(rows, 3)
    cut, ours = torch.chunk(tensor, count), Chunks(tensor, count)
    assert len(ours) == len(cut)
    assert all(torch.equal(a, b) for a, b in zip(ours, cut, strict=True))
    padded, ours = _chunk_with_empty(tensor, count, dim=0), Chunks(tensor, count, padded=True)
    assert [piece.shape for piece in ours] == [piece.shape for piece in padded]
    assert torch.equal(ours[-1], padded[-1])


def test_there_is_no_piece_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        Chunks(torch.zeros(4), 4)[4]
