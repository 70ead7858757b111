"""Third parties' backends that say what they should hold and communicate; some of them lie."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness.backends.base import SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.injected_faults import Spoiled, instead
from harness.forms import ddp
from harness.forms.terms import ModelStates, Volume
from harness.forms.workload import Workload


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
