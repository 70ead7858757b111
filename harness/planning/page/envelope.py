"""The peak of a rank as the largest of several polynomials in micro-batch and sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from harness.forms.activations import MONOMIALS, Point, Size
from harness.forms.peaks.course import Ledger, Phase, Unit
from harness.forms.peaks.families import COURSES
from harness.forms.peaks.walk import Walk
from harness.planning.memory import PHASES
from harness.planning.profiles import activation_profile
from harness.planning.scenario import Scenario

Coefficients = tuple[int, ...]
"""One per entry of MONOMIALS."""
Candidate = tuple[Coefficients, ...]
"""A state of the ledger: the smallest of these polynomials."""
NOTHING = (0,) * len(MONOMIALS)
Position = tuple[int, int]
"""Micro-batch and sequence."""
MOMENT_OF = {phase: name for name, phases in PHASES.items() for phase in phases}


class Polynomial:
    """Bytes of activations, with what `Walk` does to them; of several polynomials the least holds."""

    __slots__ = ("least",)

    def __init__(self, least: Candidate = (NOTHING,)) -> None:
        self.least = least

    def __add__(self, other: Polynomial | int) -> Polynomial:
        least: Candidate = ((other, 0, 0, 0, 0, 0),) if isinstance(other, int) else other.least
        return Polynomial(tuple(_sum(mine, its) for mine in self.least for its in least))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Polynomial:
        return Polynomial(tuple(tuple(factor * value for value in mine) for mine in self.least))

    __rmul__ = __mul__


class SymbolicLedger(Ledger):
    """Keeps every state that can be the fullest for some micro-batch and sequence."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.candidates: dict[Phase, set[Candidate]] = {}

    def look(self) -> None:
        """Note the present state. Data are as many bytes for each token, whatever else is held."""
        activations = cast("Iterable[Polynomial | int]", self.activations.values())
        data = sum(count for holding, count in self.held.items() if holding.kind == "data")
        assert data % self._tokens == 0
        held = (sum(self.held.values()) - data, 0, 0, data // self._tokens, 0, 0)
        total = Polynomial((held,))
        for size in activations:
            total += size
        self.candidates.setdefault(self.phase, set()).add(total.least)


class SymbolicWalk(Walk):
    """A step whose activations are polynomials."""

    def _bytes(self, size: Size) -> Any:
        return Polynomial((size.coefficients,))

    def _come_to(self, unit: Unit | None, point: Point, below: Any, *, backward: bool) -> None:
        here = below + self._bytes(point.live)
        present = sum(cast("Iterable[Any]", self._ledger.activations.values()), start=Polynomial())
        least = Polynomial(tuple(dict.fromkeys((*here.least, *present.least))))
        self._ledger.activations = cast("dict[Any, int]", {self._below: least})
        self._course.at_module(self._own(unit, point.module), backward=backward)
        self._look(below, point.live)


def peak_candidates(scenario: Scenario, positions: Sequence[Position]) -> list[tuple[str, Candidate]]:
    """Moment and polynomials of every state that decides the peak at one of the positions.

    The profile is that of the scenario's micro-batch: one sample, or several.
    """
    workload = scenario.workload()
    assert workload.sequence_length is not None
    ledger = SymbolicLedger(workload.micro_batch_size * workload.sequence_length)
    course = COURSES[workload.strategy.family](workload, ledger)
    SymbolicWalk(
        course, activation_profile(scenario), micro_batch=workload.micro_batch_size,
        sequence=workload.sequence_length,
    ).run()  # fmt: skip
    found = [(MOMENT_OF[phase], c) for phase, every in ledger.candidates.items() for c in every]
    deciding = {
        max(found, key=lambda entry: (candidate_bytes(entry[1], position), entry)) for position in positions
    }
    return sorted(deciding)


def candidate_bytes(candidate: Candidate, position: Position) -> int:
    """The least of its polynomials at a micro-batch and sequence."""
    b, s = position
    values = (1, b, s, b * s, s * s, b * s * s)
    return min(sum(c * value for c, value in zip(p, values, strict=True)) for p in candidate)


def _sum(first: Coefficients, second: Coefficients) -> Coefficients:
    a0, a1, a2, a3, a4, a5 = first
    b0, b1, b2, b3, b4, b5 = second
    return (a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5)
