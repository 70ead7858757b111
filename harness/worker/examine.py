"""Gradients and updates of one step by parameter, as sketches, for the diagnosis of a divergence."""

from __future__ import annotations

from harness.backends.base import Engine
from harness.run_directory.events import ExaminedEvent
from harness.worker.sketch import sketch

Sketches = dict[str, list[float]]


class Examination:
    """Of one step; both methods are collectives."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gradients: Sketches | None = None
        self._before: Sketches = {}

    def before_update(self) -> None:
        """Between the last backward pass and the update."""
        gradients = self._engine.full_gradients()
        if gradients is not None:
            self._gradients = {name: sketch(name, tensor) for name, tensor in gradients}
        self._before = self._weights()

    def after_update(self, step: int) -> ExaminedEvent:
        """Sketches of gradients (None: the engine cannot gather them) and updates, and norms of weights."""
        after = self._weights()
        return ExaminedEvent(
            step=step,
            gradients=self._gradients,
            updates={name: _difference(after[name], old) for name, old in self._before.items()},
            weight_norms={name: old[0] for name, old in self._before.items()},
        )

    def _weights(self) -> Sketches:
        return {name: sketch(name, tensor) for name, tensor in self._engine.full_parameters()}


def _difference(after: list[float], before: list[float]) -> list[float]:
    """Projections are linear; the norm of a difference is the root of their mean square."""
    projections = [a - b for a, b in zip(after[1:], before[1:], strict=True)]
    norm = (sum(value**2 for value in projections) / len(projections)) ** 0.5
    return [norm, *projections]
