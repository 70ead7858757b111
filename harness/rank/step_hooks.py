"""What the training loop tells what measures and observes it: the borders of a step and of its phases.

Hooks lie around the step like shells. `prepare` and `begin` go from the outermost to the innermost one,
`enter`, `end` and `facts` the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.record import Window


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step."""

    number: int
    """In the training, from 0."""
    since_first: int = 0
    """The same in this run, which may continue another."""
    window: Window = "warmup"
    rate: float = 0.0
    """The job's learning rate."""


class StepHook:
    """Hears of a step and returns facts about it; each method does nothing by default."""

    def prepare(self, step: Step) -> None:
        """A step is next. May wait for other ranks."""

    def begin(self) -> None:
        """The clock of the step starts; the device is idle."""

    def enter(self, phase: str, last: bool) -> None:
        """A phase begins: 'data', 'forward' and 'backward' of each micro-step, 'step', OUTSIDE.

        last: of the last micro-step of its step.
        """

    def end(self) -> None:
        """The device is idle again."""

    def facts(self) -> Mapping[str, Any]:
        """Fields of the step's event. May read tensors."""
        return {}

    def finish(self) -> None:
        """No step follows."""


class StepHooks(StepHook):
    """Several as one, from the outermost to the innermost; calls only what does something."""

    def __init__(self, hooks: Sequence[StepHook]) -> None:
        def own(name: str) -> list[Any]:
            plain = getattr(StepHook, name)
            return [getattr(one, name) for one in hooks if getattr(type(one), name) is not plain]

        self._prepare, self._begin = own("prepare"), own("begin")
        self._enter, self._end, self._facts, self._finish = (
            own(name)[::-1] for name in ("enter", "end", "facts", "finish")
        )

    def prepare(self, step: Step) -> None:
        for prepare in self._prepare:
            prepare(step)

    def begin(self) -> None:
        for begin in self._begin:
            begin()

    def enter(self, phase: str, last: bool = False) -> None:
        for enter in self._enter:
            enter(phase, last)

    def end(self) -> None:
        for end in self._end:
            end()

    def facts(self) -> dict[str, Any]:
        """Facts of all; the inner one counts where two know the same."""
        found: dict[str, Any] = {}
        for facts in self._facts:
            found = {**facts(), **found}
        return found

    def finish(self) -> None:
        for finish in self._finish:
            finish()
