"""Examines single steps by parameter: sketches of gradients and updates, norms of weights."""

from __future__ import annotations

from collections.abc import Collection

from harness.backends.base import Engine
from harness.rank.events import EventWriter
from harness.rank.probes.weights import sketch
from harness.rank.shells import Instrument, Step
from harness.record import OUTSIDE
from harness.run_directory.events import ExaminedEvent
from harness.run_directory.rank_state import PositionWriter

Sketches = dict[str, list[float]]


class Examination(Instrument):
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
        after = self._weights()
        examined = ExaminedEvent(
            step=self._step,
            gradients=self._gradients,
            updates={name: _difference(after[name], old) for name, old in self._before.items()},
            weight_norms={name: old[0] for name, old in self._before.items()},
        )
        self._events.write(examined)

    def _weights(self) -> Sketches:
        return {name: sketch(name, tensor) for name, tensor in self._engine.full_parameters()}


def _difference(after: list[float], before: list[float]) -> list[float]:
    """Projections are linear; the norm of a difference is the root of their mean square."""
    projections = [a - b for a, b in zip(after[1:], before[1:], strict=True)]
    norm = (sum(value**2 for value in projections) / len(projections)) ** 0.5
    return [norm, *projections]
