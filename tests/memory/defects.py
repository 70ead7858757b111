"""Backends with a defect of memory each, or that say what they should hold and send, some of which lie; a
comparison must name each."""

from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp import fsdp2
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, instead
from harness.backends.model.blocks import transformer_blocks
from harness.forms import ddp
from harness.forms.terms import ModelStates, Volume
from harness.forms.workload import Workload

LEAKED_BYTES = 40_000
HOARDED_BYTES = 4_000_000


class OneUnit(Fsdp2Backend):
    """Wraps the root only: no policy reaches the blocks."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        with patch.object(fsdp2, "transformer_blocks", lambda _: {}):
            return super().prepare(build_model, build_optimizer, context)


class OneUnitListed(Spoiled, OneUnit):
    """Wraps the root only, and lists every block as a unit all the same."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.strategy = replace(engine.strategy, wrap_units=[*transformer_blocks(engine.module), ""])


class Defect(Spoiled, DdpBackend):
    """DDP until `spoil` has had its way."""


class Leaking(Defect):
    """Keeps a tensor of every step."""

    every = 1
    begins = 0

    def spoil(self, engine: Any, context: SetupContext) -> None:
        kept, steps = [], count()

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            number = next(steps)
            if number >= self.begins and number % self.every == 0:
                kept.append(torch.zeros(LEAKED_BYTES // 4))
            return original(lr)


class LeakingEverySecondStep(Leaking):
    """Keeps a tensor of every second step."""

    every = 2


class LeakingLater(Leaking):
    """Keeps a tensor of each step from the eighth on."""

    begins = 7


class Spiking(Defect):
    """The update of the eighth step needs much memory on rank 1."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        steps = count()

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            if next(steps) == 7 and context.world.rank == 1:
                torch.zeros(HOARDED_BYTES // 4)
            return original(lr)


class Hiding(Defect):
    """Holds a copy of all weights in every step but the third and fourth, which are probed."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, steps = engine.step, count()

        def step(lr: float) -> float:
            hides = next(steps) in (2, 3)
            engine.copy = [] if hides else [p.detach().clone() for p in engine.module.parameters()]
            return original(lr)

        engine.step = step


class Hoarding(Defect):
    """Its last rank holds what the others do not."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == context.world.world_size - 1:
            engine.hoard = torch.zeros(HOARDED_BYTES // 4, device=context.world.device)


class Honest(DdpBackend):
    """What it claims to be."""

    claims = "ddp"


class HiddenCopy(Spoiled, Honest):
    """Keeps a copy of the weights that it does not list."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.copies = [parameter.detach().clone() for parameter in engine.module.parameters()]


class ListedCopy(Spoiled, Honest):
    """Keeps a copy of the weights and lists it as masters."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        copies = [parameter.detach().clone() for parameter in engine.module.parameters()]
        listed = engine.state_tensors
        engine.state_tensors = lambda: iter([*listed(), *(("masters", copy) for copy in copies)])


class ReducedTwice(Spoiled, Honest):
    """All-reduces gradients once more, which changes nothing but the traffic."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def backward(original: Any, loss: torch.Tensor, *, last_micro_step: bool) -> None:
            original(loss, last_micro_step=last_micro_step)
            for parameter in engine.module.parameters() if last_micro_step else ():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(context.world.world_size)


class Unclaimed(HiddenCopy):
    """Says nothing of itself."""

    claims = None


class OwnForms(DdpBackend):
    """Brings closed forms: those of DDP, which it is."""

    def closed_form(self) -> Any:
        return ddp


class WrongForms(DdpBackend):
    """Brings closed forms of something that holds and communicates nothing."""

    def closed_form(self) -> Any:
        return self

    def model_states(self, workload: Workload) -> ModelStates:
        return ModelStates(terms=())

    def collectives(self, workload: Workload) -> Volume:
        return Volume()
