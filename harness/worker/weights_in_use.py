"""Whether the weights that forward passes use are the masters, rounded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.backends.base import Engine
from harness.worker.sketch import CHUNK_ELEMENTS


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
            stale += _differing(chunk, copied)
    return Copies(elements=elements, stale=stale)


def _differing(masters: Tensor, in_use: Tensor) -> int:
    rounded = masters.to(device=in_use.device, dtype=in_use.dtype)
    return int(((rounded != in_use) & ~(rounded.isnan() & in_use.isnan())).sum())
