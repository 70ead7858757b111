"""What torch's caching allocator keeps of blocks that are as large as all that a rank updates at once.

Small tensors find room in what others left; a flat tensor of a whole sub-group finds it only in a free block
of at least its size (torch 2.13, c10/cuda/CUDACachingAllocator.cpp: get_free_block takes the smallest such
block, split_block returns the rest, free_block joins neighbours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Piece:
    """A part of a block."""

    size: int
    is_free: bool = False


@dataclass
class Blocks:
    """What the allocator got from the device, in pieces."""

    _blocks: list[list[Piece]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes that it keeps."""
        return sum(piece.size for block in self._blocks for piece in block)

    @property
    def free(self) -> int:
        """Bytes of that that nobody uses."""
        return sum(piece.size for block in self._blocks for piece in block if piece.is_free)

    def take(self, size: int) -> Piece:
        """Allocate: the smallest free piece that is large enough, else a block of its own."""
        fitting = [
            (piece.size, number, place)
            for number, block in enumerate(self._blocks)
            for place, piece in enumerate(block)
            if piece.is_free and piece.size >= size
        ]
        if not fitting:
            self._blocks.append([taken := Piece(size)])
            return taken
        _, number, place = min(fitting)
        block = self._blocks[number]
        taken, rest = block[place], block[place].size - size
        taken.size, taken.is_free = size, False
        if rest:
            block.insert(place + 1, Piece(rest, is_free=True))
        return taken

    def give(self, piece: Piece) -> None:
        """Free, and join with free neighbours."""
        block = next(block for block in self._blocks if piece in block)
        piece.is_free = True
        joined: list[Piece] = []
        for one in block:
            if joined and one.is_free and joined[-1].is_free:
                joined[-1] = Piece(joined[-1].size + one.size, is_free=True)
            else:
                joined.append(one)
        block[:] = joined


@dataclass(frozen=True, kw_only=True)
class FlatUpdate:
    """Of DeepSpeed's ZeRO-3, what its steps allocate in one piece; bytes per element."""

    pieces: Sequence[int]
    """Elements of each sub-group of a rank."""
    master: int
    gradient: int
    moments: int
    copies: int
    """Of what is updated at once, that the update makes."""
    norm: int
    """Bytes of the copy that the norm of the largest gradient takes."""
    small: int
    """Bytes up to which a tensor finds room in what the passes left."""
    copied_first: int
    """Bytes per element of what is copied as masters are made."""


def kept(update: FlatUpdate, passes: int) -> int:
    """Bytes that the allocator keeps of masters, moments, gradients and their flat copies.

    passes: bytes that forward and backward pass take besides states.
    DeepSpeed 0.19.8, stage3.py: _create_fp32_partitions, initialize_optimizer_states (a buffer of the largest
    sub-group), grad_partitions_flat_buffer; then the passes; then norms and _prepare_fp32_grad_for_sub_group.
    """
    blocks, master = Blocks(), update.master
    for count in update.pieces:
        copied = blocks.take(count * update.copied_first)
        blocks.take(count * master)
        blocks.give(copied)
    blocks.give(blocks.take(max(update.pieces) * master))
    blocks.take(sum(update.pieces) * update.gradient)
    beyond = max(0, passes - blocks.free)
    if update.norm > update.small:
        blocks.give(blocks.take(update.norm))
    for count in update.pieces:
        wide = _flat_gradient(blocks, update, count)
        blocks.take(count * update.moments)
        if (extra := count * master * update.copies) > update.small:
            blocks.give(blocks.take(extra))
        if wide is not None:
            blocks.give(wide)
    return blocks.total + beyond


def _flat_gradient(blocks: Blocks, update: FlatUpdate, count: int) -> Piece | None:
    """Laid out flat, then widened; None: it finds room in what the passes left."""
    low, high = (count * width for width in (update.gradient, update.master))
    flat = blocks.take(low) if low > update.small else None
    if low == high:
        return flat
    wide = blocks.take(high) if high > update.small else None
    if flat is not None:
        blocks.give(flat)
    return wide
