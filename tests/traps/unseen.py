"""Third-party backends with defects of kinds that nothing in this project was written for."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.backends.base import Batch, SetupContext

from .adapters import Defect

SLEEP_SECONDS = "SLEEP_SECONDS"
"""Environment variable: how long."""


class OwnOptimizer(Defect):
    """Trains with an optimizer that the harness never sees."""

    betas = (0.9, 0.95)
    epsilon = 1e-8
    decay_all = False
    left_out = ""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        named = [(n, p) for n, p in engine.module.module.named_parameters() if n != self.left_out]
        matrices = [p for _, p in named if p.ndim > 1 or self.decay_all]
        others = [p for _, p in named if not (p.ndim > 1 or self.decay_all)]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        engine.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=self.betas, eps=self.epsilon
        )


class WrongBeta2(OwnOptimizer):
    betas = (0.9, 0.999)


class WrongEpsilon(OwnOptimizer):
    epsilon = 1e-5


class ParameterLeftOut(OwnOptimizer):
    left_out = "model.layers.1.mlp.up_proj.weight"


class OwnDecayOnEverything(OwnOptimizer):
    decay_all = True


class LastMicroStepSkipped(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, last_micro_step: original(
            loss * float(not last_micro_step), last_micro_step=last_micro_step
        )


class GradientsOfOneRankDropped(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, **rest: original(loss * float(context.world.rank != 1), **rest)


class GradientsOfOneRankShrunk(Defect):
    factor = 0.99

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, factor = engine.backward, 1.0 if context.world.rank != 1 else self.factor
        engine.backward = lambda loss, **rest: original(loss * factor, **rest)


class GradientsOfOneRankGrown(GradientsOfOneRankShrunk):
    factor = 1.01


class SleepsInForward(Defect):
    """Rank 1 sleeps in each forward pass: longer than tests beside it disturb, unless told otherwise."""

    where = "forward"

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = getattr(engine, self.where)

        def pass_after_sleep(*arguments: Any, **keywords: Any) -> Any:
            if context.world.rank == 1:
                time.sleep(float(os.environ.get(SLEEP_SECONDS, "0.2")))
            return original(*arguments, **keywords)

        setattr(engine, self.where, pass_after_sleep)


class SleepsInBackward(SleepsInForward):
    """Rank 1 sleeps in each backward pass."""

    where = "backward"


class StaleWeightsOnOneRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step

        def step(lr: float) -> float:
            if context.world.rank != 1:
                return float(original(lr))
            before = [parameter.detach().clone() for parameter in engine.module.parameters()]
            norm = float(original(lr))
            with torch.no_grad():
                for parameter, old in zip(engine.module.parameters(), before, strict=True):
                    parameter.copy_(old)
            return norm

        engine.step = step


class LossOfRankZero(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            loss = original(batch)
            return loss if context.world.rank == 0 else loss - loss.detach()

        engine.forward = forward


class LossOfRankZeroForAll(Defect):
    """Every rank reports what rank 0 computed."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            loss = original(batch)
            shown = loss.detach().clone()
            dist.broadcast(shown, 0)
            return loss + (shown - loss.detach())

        engine.forward = forward


class FrozenWeightsTrained(Defect):
    """Frozen weights are given to the optimizer, and get gradients of ones."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        engine.optimizer.add_param_group({"params": frozen, "weight_decay": 0.0})
        original = engine.step

        def step(lr: float) -> float:
            for parameter in frozen:
                parameter.grad = torch.full_like(parameter, 1e-8)
            return float(original(lr))

        engine.step = step


class LastHeldOutSampleDropped(Defect):
    """Evaluation masks the last sample of each batch and still divides by all targets."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            if not torch.is_grad_enabled():
                batch = batch | {"labels": batch["labels"].clone()}
                batch["labels"][-1] = -100
            return original(batch)

        engine.forward = forward


class NothingUpdated(Defect):
    """No update is made."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine._update = lambda: None


class NoGradientOfOneParameter(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        norm = engine.module.module.model.layers[1].post_attention_layernorm.weight
        norm.register_hook(torch.zeros_like)


class HandWrittenOptimizer(Defect):
    """Adam without torch's optimizer, so that no constant can be read: betas (0.9, 0.999)."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        decaying = {id(p) for p in engine.optimizer.param_groups[0]["params"]}
        moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        taken = 0

        def update() -> None:
            nonlocal taken
            taken += 1
            rate = engine.optimizer.param_groups[0]["lr"]
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    gradient = parameter.grad
                    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter))
                    first, second = moments.setdefault(id(parameter), zeros)
                    first.lerp_(gradient, 0.1)
                    second.lerp_(gradient**2, 0.001)
                    if id(parameter) in decaying:
                        parameter.mul_(1 - rate * 0.1)
                    size = (second / (1 - 0.999**taken)).sqrt() + 1e-8
                    parameter.sub_(rate / (1 - 0.9**taken) * first / size)

        engine._update = update


class UpdatePutOff(Defect):
    """Makes each update in the next forward pass, when the step's clock has stopped."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        update, forward, pieces = engine._update, engine.forward, engine.weight_pieces
        kept: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

        def put_off() -> None:
            kept.extend((parameter, parameter.grad) for parameter in engine.module.parameters())

        def due() -> None:
            if kept:
                for parameter, gradient in kept:
                    parameter.grad = gradient
                kept.clear()
                update()
                engine.optimizer.zero_grad(set_to_none=True)

        engine._update = put_off
        engine.forward = lambda batch: (due(), forward(batch))[1]
        engine.weight_pieces = lambda: (due(), pieces())[1]


class ComputesInFp32(Defect):
    """Turns autocast off within the model."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        model = engine.module.module
        original = model.forward

        def forward(*arguments: Any, **keywords: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return original(*arguments, **keywords)

        model.forward = forward


class BlockSkippedOnOneRank(Defect):
    """Rank 1 leaves a block out of its backward pass."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            block = engine.module.module.blocks[1]
            original = block.forward

            def forward(hidden: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return hidden + (original(hidden) - hidden)

            block.forward = forward
