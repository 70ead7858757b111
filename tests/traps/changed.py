"""Third-party backends that change a setting of the optimizer while they train, of three families."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from harness.backends.base import SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend

from .execution import Spoiled, Stage3, live_groups
from .late import Late


class Changed(Spoiled):
    """Changes something after LATE_STEP steps."""

    spoil = Late.spoil  # type: ignore[assignment]

    @abstractmethod
    def spoil_late(self, engine: Any, context: SetupContext) -> None:
        """Change it."""


def _lower_beta(_: Any, engine: Any, __: SetupContext) -> None:
    for group in live_groups(engine):
        group["betas"] = (group["betas"][0], 0.5)


def _clip_lower(_: Any, engine: Any, __: SetupContext) -> None:
    if (library := getattr(engine, "engine", None)) is not None:
        library.optimizer.clip_grad = 0.01
    else:
        engine.context = replace(engine.context, gradient_clipping=0.01)


def _keep_rate_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        original, kept = engine.step, live_groups(engine)[0]["lr"]
        engine.step = lambda lr: original(kept)


def _decay_for_a_step(_: Any, engine: Any, __: SetupContext) -> None:
    before, original = [group["weight_decay"] for group in live_groups(engine)], engine.step

    def step_after(lr: float) -> float:
        for group, decay in zip(live_groups(engine), before, strict=True):
            group["weight_decay"] = decay
        engine.step = original
        return float(original(lr))

    def step(lr: float) -> float:
        engine.step = step_after
        return float(original(lr))

    for group in live_groups(engine):
        group["weight_decay"] = 10.0
    engine.step = step


class LateBetaOfDdp(Changed, DdpBackend):
    spoil_late = _lower_beta


class LateBetaAtStage3(Changed, Stage3):
    spoil_late = _lower_beta


class LateBetaOfFsdp(Changed, Fsdp2Backend):
    spoil_late = _lower_beta


class LateClippingOfDdp(Changed, DdpBackend):
    spoil_late = _clip_lower


class LateClippingAtStage3(Changed, Stage3):
    spoil_late = _clip_lower


class LateClippingOfFsdp(Changed, Fsdp2Backend):
    spoil_late = _clip_lower


class RateKeptOnOneRankOfDdp(Changed, DdpBackend):
    spoil_late = _keep_rate_of_one_rank


class RateKeptOnOneRankAtStage3(Changed, Stage3):
    spoil_late = _keep_rate_of_one_rank


class RateKeptOnOneRankOfFsdp(Changed, Fsdp2Backend):
    spoil_late = _keep_rate_of_one_rank


class DecayForAStepOfDdp(Changed, DdpBackend):
    spoil_late = _decay_for_a_step


class DecayForAStepAtStage3(Changed, Stage3):
    spoil_late = _decay_for_a_step


class DecayForAStepOfFsdp(Changed, Fsdp2Backend):
    spoil_late = _decay_for_a_step
