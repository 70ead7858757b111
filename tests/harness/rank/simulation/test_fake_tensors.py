"""Bytes of tensors without data, as an allocator would count them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from harness.rank.simulation.fake_tensors import Chunks, CountingMode, FakeAllocatorProbe, resizes_noted
from harness.rank.simulation.simulated_rank import in_words

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


def test_experts_in_another_dtype_than_their_kernel_s_say_which_to_set() -> None:
    raised = RuntimeError("Expected inputs of BF16 type but got mat_a.dtype=torch.float32 and more.")
    assert in_words(raised).endswith("takes bf16 alone; set training.precision=bf16-mixed")
    assert in_words(ValueError("two\n  lines")) == "ValueError: two lines"
