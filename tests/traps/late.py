"""Third-party backends whose defect begins after a few sound steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from harness.backends.base import SetupContext

from .adapters import Defect, SameBatchOnEveryRank
from .unseen import BlockSkippedOnOneRank, GradientsOfOneRankDropped, LossOfRankZero

LATE_STEP = 3
"""Optimizer steps that are left alone."""


class Late(Defect):
    """A defect that begins after LATE_STEP steps."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, taken = engine.step, 0

        def step(lr: float) -> float:
            nonlocal taken
            norm = float(original(lr))
            taken += 1
            if taken == LATE_STEP:
                self.spoil_late(engine, context)
            return norm

        engine.step = step

    @abstractmethod
    def spoil_late(self, engine: Any, context: SetupContext) -> None:
        """Plant the defect."""


def _late(defect: type[Defect]) -> Callable[[Late, Any, SetupContext], None]:
    return lambda self, engine, context: defect.spoil(self, engine, context)  # type: ignore[arg-type]


class LateGradientsOfOneRankDropped(Late):
    spoil_late = _late(GradientsOfOneRankDropped)


class LateSameBatchOnEveryRank(Late):
    spoil_late = _late(SameBatchOnEveryRank)


class LateLossOfRankZero(Late):
    spoil_late = _late(LossOfRankZero)


class LateBlockSkippedOnOneRank(Late):
    spoil_late = _late(BlockSkippedOnOneRank)


class LateDecayOnEverything(Late):
    def spoil_late(self, engine: Any, context: SetupContext) -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 10.0
