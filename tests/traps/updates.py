"""Third-party backends whose updates are not what Adam makes of gradients, of each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp1 import Fsdp1Backend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend

from .changed import Changed
from .execution import Spoiled, Stage1, Stage2, Stage3
from .late import LATE_STEP


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The one of torch that updates; DeepSpeed keeps it within its own."""
    library = getattr(engine, "engine", None)
    return engine.optimizer if library is None else library.basic_optimizer  # type: ignore[no-any-return]


def _after_each_step(engine: Any, change: Callable[[int], None]) -> None:
    """change: given the number of updates so far."""
    original, taken = engine.step, 0

    def step(lr: float) -> float:
        nonlocal taken
        norm = float(original(lr))
        taken += 1
        with torch.no_grad():
            change(taken)
        return norm

    engine.step = step


def _moments(engine: Any) -> list[Tensor]:
    states = optimizer_of(engine).state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]


def _lose_moments(_: Any, engine: Any, __: SetupContext) -> None:
    for moment in _moments(engine):
        moment.zero_()


class MomentsLostOfDdp(Changed, DdpBackend):
    spoil_late = _lose_moments


class MomentsLostAtStage2(Changed, Stage2):
    spoil_late = _lose_moments


class MomentsLostOfFsdp1(Changed, Fsdp1Backend):
    spoil_late = _lose_moments


def _begin_anew(_: Any, engine: Any, __: SetupContext) -> None:
    optimizer_of(engine).state.clear()


class StatesAnewAtStage1(Changed, Stage1):
    spoil_late = _begin_anew


class StatesAnewOfFsdp(Changed, Fsdp2Backend):
    spoil_late = _begin_anew


def _round_moments(_: Any, engine: Any, __: SetupContext) -> None:
    def change(taken: int) -> None:
        for moment in _moments(engine):
            moment.copy_(moment.bfloat16())

    _after_each_step(engine, change)


class MomentsRoundedOfDdp(Spoiled, DdpBackend):
    spoil = _round_moments


class MomentsRoundedAtStage3(Spoiled, Stage3):
    spoil = _round_moments


class MomentsRoundedOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _round_moments


class HandWritten(torch.optim.AdamW):
    """AdamW by hand."""

    eps_in_root = False
    corrects_bias = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[parameter]
        if "exp_avg" not in state:
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros(())
        state["step"] += 1
        gradient, first, second = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.corrects_bias:
            taken = float(state["step"])
            first, second = first / (1 - beta1**taken), second / (1 - beta2**taken)
        size = (second + group["eps"]).sqrt() if self.eps_in_root else second.sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * first / size)


class EpsInRoot(HandWritten):
    eps_in_root = True


class BiasUncorrected(HandWritten):
    corrects_bias = False


def _becoming(kind: type[HandWritten]) -> Callable[[Any, Any, SetupContext], None]:
    """As where a library patches torch's own: class and constants look the same."""

    def spoil(_: Any, engine: Any, __: SetupContext) -> None:
        optimizer: Any = optimizer_of(engine)
        optimizer.__class__ = type("AdamW", (kind,), {"__module__": torch.optim.AdamW.__module__})
        optimizer._patch_step_function()

    return spoil


class EpsInRootOfDdp(Spoiled, DdpBackend):
    spoil = _becoming(EpsInRoot)


class EpsInRootAtStage1(Spoiled, Stage1):
    spoil = _becoming(EpsInRoot)


class EpsInRootAtStage3(Spoiled, Stage3):
    spoil = _becoming(EpsInRoot)


class EpsInRootOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _becoming(EpsInRoot)


class BiasUncorrectedAtStage2(Spoiled, Stage2):
    spoil = _becoming(BiasUncorrected)


class BiasUncorrectedOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _becoming(BiasUncorrected)


Changing = Callable[[nn.Parameter, Tensor, dict[str, Any]], None]


def _within_update(engine: Any, change: Changing) -> None:
    """change: given each tensor after its update, its values before that, and its group."""
    before: list[tuple[nn.Parameter, Tensor, dict[str, Any]]] = []

    def keep(live: torch.optim.Optimizer, *_: Any) -> None:
        before[:] = [(p, p.detach().clone(), group) for group in live.param_groups for p in group["params"]]

    @torch.no_grad()
    def spoil(*_: Any) -> None:
        for kept in before:
            change(*kept)

    optimizer_of(engine).register_step_pre_hook(keep)
    optimizer_of(engine).register_step_post_hook(spoil)


def _leave_part_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        _within_update(engine, lambda parameter, before, _: parameter.copy_(before))


class PartLeftAtStage1(Spoiled, Stage1):
    spoil = _leave_part_of_one_rank


class PartLeftAtStage2(Spoiled, Stage2):
    spoil = _leave_part_of_one_rank


class PartLeftAtStage3(Spoiled, Stage3):
    spoil = _leave_part_of_one_rank


class PartLeftOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _leave_part_of_one_rank


class PartLeftOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _leave_part_of_one_rank


def _undo_decay_of_one_rank(_: Any, engine: Any, context: SetupContext) -> None:
    if context.world.rank == 1:
        _within_update(
            engine,
            lambda parameter, before, group: parameter.add_(
                before, alpha=group["lr"] * group["weight_decay"]
            ),
        )


class DecayUndoneAtStage3(Spoiled, Stage3):
    spoil = _undo_decay_of_one_rank


class DecayUndoneOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _undo_decay_of_one_rank


def _double_one_rate(_: Any, engine: Any, __: SetupContext) -> None:
    """One update moves weights twice as far; the learning rate is back when it is over.

    DeepSpeed calls the optimizer once for each group, and doubles the rate of one.
    """
    taken = 0

    def double(live: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal taken
        taken += 1
        for group in live.param_groups if taken == LATE_STEP + 1 else ():
            group["lr"] *= 2

    def halve(live: torch.optim.Optimizer, *_: Any) -> None:
        for group in live.param_groups if taken == LATE_STEP + 1 else ():
            group["lr"] /= 2

    optimizer_of(engine).register_step_pre_hook(double)
    optimizer_of(engine).register_step_post_hook(halve)


class RateDoubledOnceAtStage1(Spoiled, Stage1):
    spoil = _double_one_rate


class RateDoubledOnceOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _double_one_rate


def _pull_back(_: Any, engine: Any, __: SetupContext) -> None:
    """Each update is averaged with the weights of the beginning, as where an average lies in the weights."""
    first: dict[int, Tensor] = {}

    def pull(parameter: nn.Parameter, before: Tensor, _: dict[str, Any]) -> None:
        parameter.lerp_(first.setdefault(id(parameter), before), 0.05)

    _within_update(engine, pull)


class PulledBackOfDdp(Spoiled, DdpBackend):
    spoil = _pull_back


class PulledBackOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _pull_back
