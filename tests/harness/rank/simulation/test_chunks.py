"""Pieces that are cut when asked for are those that torch cuts."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from harness.rank.simulation.fake_tensors import Chunks


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
