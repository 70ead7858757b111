"""One line of a memory prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """A part of what lies in memory at one moment."""

    kind: str
    """'weights', 'gathered', 'gradients', 'masters', 'optimizer', 'activations', 'communication', 'buffers',
    'data' or 'temporary'."""
    name: str
    bytes: int
    formula: str
    """With the symbols of `docs/estimate.md`, such as '2 b s h L'."""
    source: str
    """Paper, or library with version, file and function."""
    host: bool = False
