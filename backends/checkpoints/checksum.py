"""A checksum of Adam's moments, equal for equal moments whatever ranks hold which parts of them."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Engine
from harness.backends.piece import MOMENTS, Piece

ELEMENTS_AT_ONCE = 2**20


def moments_checksum(engine: Engine) -> str:
    """16 hexadecimal digits; a collective. Raises Unsupported where the engine does not list its pieces.

    The sum, modulo 2^64, of the bits of every element as fp32, times an odd number that follows from its
    parameter and place: any one value that changed or moved changes it, and each rank adds its own part.
    """
    total = 0
    for piece in engine.pieces():
        first, last = piece.own_range()
        for moment in MOMENTS:
            if moment not in piece.moments:
                continue  # of a frozen parameter
            factor = zlib.crc32(f"{piece.name} {moment}".encode()) | 1
            own = piece.moments[moment][first:last]
            total += factor * _weighted_sum(own, piece, piece.start + first)
    totals: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(totals, total % 2**64)
    return f"{sum(totals) % 2**64:016x}"


def _weighted_sum(values: Tensor, piece: Piece, start: int) -> int:
    """Of a 1-D tensor whose first element is number `start` of what the piece is a range of."""
    total = 0
    for low in range(0, values.numel(), ELEMENTS_AT_ONCE):
        part = values[low : low + ELEMENTS_AT_ONCE]
        bits = part.float().view(torch.int32).to(torch.int64)
        places = torch.arange(start + low, start + low + part.numel(), device=part.device)
        if (held := piece.columns) is not None:
            row, column = places // held.count, places % held.count
            places = row * piece.shape[1] + held.first + column
        total += int(((bits + 1) * (places * 2 + 1)).sum())  # int64 wraps around
    return total
