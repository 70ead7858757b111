"""A digest of all master weights, equal for equal weights whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from harness.backends.base import Engine
from harness.backends.piece import Piece
from harness.backends.unsupported import Unsupported
from harness.errors import HarnessError
from harness.record import WeightsPart
from harness.record.model import DIGEST_KIND
from harness.worker.sketch import content_sum, partial_sketch


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Of one rank's part of one parameter; those of ranks that hold disjoint parts add up."""

    shape: tuple[int, ...]
    start: int
    elements: int
    copy: int
    content: int
    """See `sketch.content_sum`."""
    sketch: tuple[float, ...]
    """See `sketch.partial_sketch`; of what this copy takes on, where several ranks hold the same."""


Share = dict[str, _Sums]


def digest_share(engine: Engine) -> Share:
    """By parameter, what this rank finds of the master weights that it holds.

    Nothing is gathered; an engine that does not list its pieces gathers tensor by tensor: a collective.
    """
    return {piece.name: _sums(piece, alone=False) for piece in _pieces(engine)}


def combined(share: Share, engine: Engine) -> WeightsPart:
    """SHA-256 over the sorted (name, shape, sum of the contents), L2 norm, count, a sketch of each.

    A collective. Where ranks that should hold the same do not, each returns the weights of its own copy.
    Without a sketch where a weight is not finite. Raises HarnessError where the parts are not the whole.
    """
    shares = _from_all(share)
    if all(_agree(found) for found in _by_name(shares).values()):
        return _part(share, shares)
    alone = {piece.name: _sums(piece, alone=True) for piece in _pieces(engine)}
    return _part(alone, _from_all(alone), copies_differ=True)


def digest_weights(engine: Engine) -> WeightsPart:
    """Both in one; a collective."""
    return combined(digest_share(engine), engine)


def _pieces(engine: Engine) -> Iterator[Piece]:
    """Of the master weights; all of them on every rank where the engine cannot list its pieces."""
    try:
        pieces = engine.weight_pieces()
    except Unsupported:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        for name, tensor in engine.full_parameters():
            yield Piece(
                name=name, shape=tuple(tensor.shape), start=0, weight=tensor.reshape(-1), moments={},
                copies=world_size, copy=rank,
            )  # fmt: skip
        return
    yield from pieces


def _sums(piece: Piece, *, alone: bool) -> _Sums:
    """alone: with the sketch of all that this rank holds, which ranks with the same otherwise divide."""
    low, high = (0, piece.weight.numel()) if alone else piece.own_range()
    return _Sums(
        shape=piece.shape,
        start=piece.start,
        elements=piece.weight.numel(),
        copy=piece.copy,
        content=content_sum(piece.name, piece.weight, piece.start),
        sketch=tuple(partial_sketch(piece.name, piece.weight[low:high], piece.start + low)),
    )


def _from_all(share: Share) -> Sequence[Share]:
    shares = [share] * dist.get_world_size()
    if len(shares) > 1:
        dist.all_gather_object(shares, share)
    return shares


def _by_name(shares: Sequence[Share]) -> dict[str, list[_Sums]]:
    found: dict[str, list[_Sums]] = {}
    for share in shares:
        for name, sums in share.items():
            found.setdefault(name, []).append(sums)
    return found


def _agree(found: Sequence[_Sums]) -> bool:
    """Whether ranks with the same range of a parameter have the same in it."""
    contents: dict[tuple[int, int], int] = {}
    return all(contents.setdefault((one.start, one.elements), one.content) == one.content for one in found)


def _part(own: Share, shares: Sequence[Share], *, copies_differ: bool = False) -> WeightsPart:
    """Of the copy of each parameter that this rank has a part of; the first where it has none.

    Sketches are those of all ranks together, or of the copy alone where copies differ.
    """
    lines: list[str] = []
    sketches: dict[str, list[float]] = {}
    count = 0
    for name, found in _by_name(shares).items():
        number = own[name].copy if name in own else 0
        copy = [sums for sums in found if sums.copy == number]
        shape = copy[0].shape
        elements = sum(sums.elements for sums in copy)
        if elements != math.prod(shape):
            raise HarnessError(
                f"the ranks list {elements} of the {math.prod(shape)} elements of {name}: "
                "`Engine.weight_pieces` of this backend leaves some out, or lists some twice"
            )
        lines.append(f"{name} {shape} {sum(sums.content for sums in copy) % 2**64:016x}")
        parts = (sums.sketch for sums in (copy if copies_differ else found))
        square, *projections = (sum(values) for values in zip(*parts, strict=True))
        sketches[name] = [square**0.5, *projections]
        count += elements
    lines_of_all = "\n".join(sorted(lines))
    finite = all(math.isfinite(value) for values in sketches.values() for value in values)
    return WeightsPart(
        digest=f"{hashlib.sha256(lines_of_all.encode()).hexdigest()}{DIGEST_KIND}",
        l2_norm=math.fsum(values[0] ** 2 for values in sketches.values()) ** 0.5,
        parameter_count=count,
        sketch=sketches if finite else None,
    )
