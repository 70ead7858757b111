"""A digest of all master weights, equal for equal weights whatever the strategy that holds them; sketches of
gradients and updates in single steps, by parameter."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Engine
from harness.backends.optimizer.gradients import real_numbers
from harness.backends.piece import MOMENTS, Piece
from harness.backends.refusals import Unsupported
from harness.rank.step_hooks import Step, StepHook
from harness.record import OUTSIDE, WeightsPart
from harness.run_directory.events import (
    EventWriter,
    ExaminedEvent,
    Held,
    Ranges,
    Share,
    copy_of,
    whole_weights,
)
from harness.run_directory.rank_state import PositionWriter

PROJECTIONS = 8
ROW_ELEMENTS = 1024
CHUNK_ROWS = 1024
CHUNK_ELEMENTS = CHUNK_ROWS * ROW_ELEMENTS


def sketch(name: str, tensor: Tensor) -> list[float]:
    """[L2 norm, projections...] of a tensor of any shape, dtype and device, accumulated in fp64."""
    square, *projections = partial_sketch(name, tensor.reshape(-1), 0)
    return [square**0.5, *projections]


def partial_sketch(name: str, part: Tensor, start: int) -> list[float]:
    """[sum of squares, projections...] of elements `start` and on of a flattened tensor.

    The sign of element i is that of its column times that of its row in rows of ROW_ELEMENTS, so that
    a tensor of n elements costs two small matrices of random signs and not n of them.
    """
    generator = _generator(name)
    columns = (
        _signs((ROW_ELEMENTS, PROJECTIONS), generator).t().contiguous()
    )  # twice as fast as rows @ columns
    total = torch.zeros(PROJECTIONS, dtype=torch.float64)
    square = torch.zeros((), dtype=torch.float64)
    drawn = 0
    for chunk, rows in _chunks(part, start, torch.float64):
        while drawn <= chunk:
            signs = _signs((CHUNK_ROWS, PROJECTIONS), generator)
            drawn += 1
        values = rows.view(-1)
        square += torch.dot(values, values)
        total += (signs[: len(rows)].t() * (columns @ rows.t())).sum(dim=1)
    return [float(square), *total.tolist()]


def content_sum(name: str, part: Tensor, start: int) -> int:
    """Checksum of the bits, in fp32, of elements `start` and on of a flattened tensor; from 0 to 2^64 - 1.

    Sums of parts that together are the tensor add up to its own, modulo 2^64.
    """
    generator = _generator(f"{name}: content")
    columns = _odd_numbers(ROW_ELEMENTS // 2, generator)
    total = 0
    drawn = 0
    for chunk, rows in _chunks(part, start, torch.float32):
        while drawn <= chunk:
            factors = _odd_numbers(CHUNK_ROWS, generator)
            drawn += 1
        total += int(torch.dot(torch.mv(rows.view(torch.int64), columns), factors[: len(rows)]))
    return total % 2**64


def _chunks(part: Tensor, start: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the flattened tensor that a part meets: number, rows; zero where the part has no elements.

    A chunk's tensor is overwritten by the next: fresh memory costs more than the sums.
    """
    if part.is_complex():
        part, start = real_numbers(part).reshape(-1), 2 * start
    elements = part.numel()
    if not elements:
        return
    first, stop = start // CHUNK_ELEMENTS, -(-(start + elements) // CHUNK_ELEMENTS)
    last_rows = -(-min(start + elements - first * CHUNK_ELEMENTS, CHUNK_ELEMENTS) // ROW_ELEMENTS)
    padded = torch.zeros((last_rows if stop - first == 1 else CHUNK_ROWS) * ROW_ELEMENTS, dtype=dtype)
    for chunk in range(first, stop):
        begin = chunk * CHUNK_ELEMENTS
        low, high = max(begin, start), min(begin + CHUNK_ELEMENTS, start + elements)
        rows = padded[: -(-(high - begin) // ROW_ELEMENTS) * ROW_ELEMENTS]
        rows[: low - begin] = 0
        rows[low - begin : high - begin].copy_(part[low - start : high - start])
        rows[high - begin :] = 0
        yield chunk, rows.view(-1, ROW_ELEMENTS)


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:15], 16))


def _signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


def _odd_numbers(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Of one rank: elements of the masters of which another tensor is in use."""

    elements: int
    stale: int
    """Those whose weight in use is another value than the master rounded to its dtype."""


def count_copies(engine: Engine) -> Copies:
    """Compare what this rank updates with what its forward passes use; nothing is communicated."""
    elements = stale = 0
    for masters, in_use in engine.weights_in_use():
        elements += masters.numel()
        for chunk, copied in zip(masters.split(CHUNK_ELEMENTS), in_use.split(CHUNK_ELEMENTS), strict=True):
            rounded = chunk.to(device=copied.device, dtype=copied.dtype)
            stale += int(((rounded != copied) & ~(rounded.isnan() & copied.isnan())).sum())
    return Copies(elements=elements, stale=stale)


T = TypeVar("T")


def digest_share(engine: Engine) -> Share:
    """What this rank finds of the master weights that it holds, by parameter.

    Nothing is gathered; an engine that does not list its pieces gathers tensor by tensor: a collective.
    """
    return {
        piece.name: Held(
            shape=piece.shape,
            start=piece.start,
            elements=piece.weight.numel(),
            content=content_sum(piece.name, piece.weight, piece.start),
        )
        for piece in _pieces(engine)
    }


def combined(share: Share, engine: Engine) -> WeightsPart:
    """SHA-256 over the sorted (name, shape, sum of the contents), L2 norm, count, a sketch of each; whether
    weights in use are their rounded masters.

    A collective. Where ranks that hold the same elements differ in them, each returns the weights of its own
    copy. Without a sketch where a weight is not finite. Raises HarnessError where the ranges are not the
    whole.
    """
    rank, shares = dist.get_rank(), _from_all(share)
    ranges, digest, count = whole_weights(shares, rank)
    agree = all(
        len({shares[holder][name].content for holder in holders}) == 1
        for name, of_name in ranges.items()
        for holders in of_name.values()
    )
    told = _from_all((dict(_own_sketches(engine, ranges, divided=agree)), count_copies(engine)))
    sketches, copies = [one for one, _ in told], [of_rank for _, of_rank in told]
    whole: dict[str, list[float]] = {}
    for name, of_name in ranges.items():
        copy = copy_of(rank, of_name)
        parts = [one[name] for n, one in enumerate(sketches) if name in one and (agree or n in copy)]
        square, *projections = (sum(values) for values in zip(*parts, strict=True))
        whole[name] = [square**0.5, *projections]
    finite = all(math.isfinite(value) for values in whole.values() for value in values)
    return WeightsPart(
        digest=digest,
        l2_norm=math.fsum(values[0] ** 2 for values in whole.values()) ** 0.5,
        parameter_count=count,
        sketch=whole if finite else None,
        copied_elements=sum(of_rank.elements for of_rank in copies) or None,
        stale_elements=sum(of_rank.stale for of_rank in copies) if any(c.elements for c in copies) else None,
        apart={} if agree or not finite else dict(_apart(ranges, shares, sketches)),
    )


def _apart(
    ranges: Mapping[str, Ranges], shares: Sequence[Share], sketches: Sequence[Mapping[str, list[float]]]
) -> Iterator[tuple[str, float]]:
    for name, of_name in ranges.items():
        pairs = ((holders[0], other) for holders in of_name.values() for other in holders[1:])
        unlike = [(a, b) for a, b in pairs if shares[a][name].content != shares[b][name].content]
        if unlike:
            far = max(math.dist(sketches[a][name][1:], sketches[b][name][1:]) for a, b in unlike)
            yield name, far / math.sqrt(PROJECTIONS)


def digest_weights(engine: Engine) -> WeightsPart:
    """Both in one; a collective."""
    return combined(digest_share(engine), engine)


def moment_sums(engine: Engine) -> Mapping[str, tuple[float, float]] | None:
    """Sums of the squares of Adam's first and of its second moments that this rank holds, by parameter.

    Those of all ranks add up to the parameter's: ranks that hold the same divide it. None: the engine does
    not list its pieces. What is not finite is left out. Nothing is communicated;
    states that are missing are made.
    """
    found = {}
    try:
        for piece in engine.pieces():
            if MOMENTS[1] in piece.moments:
                first, last = piece.own_range()
                sums = torch.zeros(2, dtype=torch.float64, device=piece.weight.device)
                moments = (piece.moments[name][first:last].split(CHUNK_ELEMENTS) for name in MOMENTS)
                for one, other in zip(*moments, strict=True):
                    sums[0] += real_numbers(one).double().square().sum()
                    sums[1] += real_numbers(other).double().sum()
                if bool(sums.isfinite().all()):
                    found[piece.name] = (float(sums[0]), float(sums[1]))
    except Unsupported:
        return None
    return found


def _pieces(engine: Engine) -> Iterator[Piece]:
    """Pieces of the master weights; all of them on every rank where the engine cannot list its pieces."""
    try:
        pieces = engine.weight_pieces()
    except Unsupported:
        for name, tensor in engine.full_parameters():
            yield Piece(name=name, shape=tuple(tensor.shape), start=0, weight=tensor.reshape(-1), moments={})
        return
    yield from pieces


def _own_sketches(
    engine: Engine, ranges: Mapping[str, Ranges], *, divided: bool
) -> Iterator[tuple[str, list[float]]]:
    """Sketches of what this rank holds. divided: ranks that hold the same divide it."""
    rank = dist.get_rank()
    for piece in _pieces(engine):
        elements = piece.weight.numel()
        holders = ranges[piece.name].get((piece.start, elements), ())
        if rank in holders:
            copies, copy = (len(holders), holders.index(rank)) if divided else (1, 0)
            low, high = (elements * n // copies for n in (copy, copy + 1))
            yield piece.name, partial_sketch(piece.name, piece.weight[low:high], piece.start + low)


def _from_all(of_this_rank: T) -> Sequence[T]:
    found = [of_this_rank] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, of_this_rank)
    return found


Sketches = dict[str, list[float]]


class Examination(StepHook):
    """Of the steps that were asked for; gathering for it is a collective."""

    def __init__(
        self, engine: Engine, steps: Collection[int], position: PositionWriter, events: EventWriter
    ) -> None:
        self._engine, self._steps, self._position, self._events = engine, steps, position, events
        self._step = 0
        self._gradients: Sketches | None = None
        self._before: Sketches = {}

    def prepare(self, step: Step) -> None:
        self._step = step.number

    def enter(self, phase: str, last: bool) -> None:
        """Before the update read gradients (None: the engine cannot gather them) and weights; after it write
        what changed."""
        if self._step not in self._steps or phase not in ("step", OUTSIDE):
            return
        self._position.enter("examination")
        if phase == "step":
            gradients = self._engine.full_gradients()
            self._gradients = None if gradients is None else {n: sketch(n, tensor) for n, tensor in gradients}
            self._before = self._weights()
            return
        after, updates = self._weights(), Sketches()
        for name, (_, *before) in self._before.items():
            # Projections are linear; the norm of a difference is the root of their mean square.
            moved = [a - b for a, b in zip(after[name][1:], before, strict=True)]
            updates[name] = [(sum(value**2 for value in moved) / len(moved)) ** 0.5, *moved]
        examined = ExaminedEvent(
            step=self._step,
            gradients=self._gradients,
            updates=updates,
            weight_norms={name: old[0] for name, old in self._before.items()},
        )
        self._events.write(examined)

    def _weights(self) -> Sketches:
        return {name: sketch(name, tensor) for name, tensor in self._engine.full_parameters()}
