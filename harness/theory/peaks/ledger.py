"""The bytes that a rank holds as a step proceeds, by cause, and the fullest state of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "reduction", "step"]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A cause of bytes."""

    kind: str
    """As in `harness.planning.memory.MemoryTerm`."""
    name: str
    formula: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Fullest:
    """A state of the ledger."""

    bytes: int
    held: dict[Holding, int]


class Ledger:
    """A family adds and drops; whoever drives it says how much the activations take."""

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.held: dict[Holding, int] = {}
        self.activations: dict[Holding, int] = {}
        self.fullest: dict[Phase, Fullest] = {}

    def add(self, holding: Holding, count: int) -> None:
        """Allocate bytes."""
        if count:
            self.held[holding] = self.held.get(holding, 0) + count

    def drop(self, holding: Holding, count: int | None = None) -> None:
        """Free bytes; None: all of this cause."""
        if count is None:
            self.held.pop(holding, None)
        elif count:
            self.held[holding] -= count

    def look(self) -> None:
        """Compare the present state with the fullest of its phase."""
        total = sum(self.held.values()) + sum(self.activations.values())
        fullest = self.fullest.get(self.phase)
        if fullest is None or total > fullest.bytes:
            held = {h: count for h, count in (self.held | self.activations).items() if count}
            self.fullest[self.phase] = Fullest(bytes=total, held=held)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count as another phase inside."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    @contextmanager
    def temporarily(self, *holdings: tuple[Holding, int]) -> Iterator[None]:
        """Bytes that live inside only; looks at the ledger once they are there."""
        for holding, count in holdings:
            self.add(holding, count)
        self.look()
        yield
        for holding, count in holdings:
            self.drop(holding, count)
