"""Third-party backends with a mistake of jobs with adapters each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harness.backends.base import BackendOptions, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.piece import Piece
from harness.backends.zero.backend import ZeroBackend


class NotGathered(ZeroBackend):
    """T37: peft's state dict under ZeRO-3, taken without gathering the parameters."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=3)

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        original = engine.weight_pieces

        def weight_pieces() -> Iterator[Piece]:
            live = dict(engine.engine.module.named_parameters())
            for piece in original():
                if ".lora_" not in piece.name:
                    yield piece
                    continue
                held = live[piece.name].detach().float()
                yield Piece(
                    name=piece.name, shape=tuple(held.shape), start=0, weight=held.view(-1), moments={}
                )

        engine.weight_pieces = weight_pieces
        return engine


class Bf16Key(ZeroBackend):
    """T39: DeepSpeed's `bf16` key on a model whose frozen weights are bf16: adapters become bf16 too."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=2)

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, build_optimizer, replace(context, precision="bf16-mixed"))


class OneRankInBf16(DdpBackend):
    """T41: `bf16=True` on one GPU leaves adapters in bf16; on several FSDP makes fp32 masters of them."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            return build_model().to(torch.bfloat16)

        one = context.world.world_size == 1
        return super().prepare(build if one else build_model, build_optimizer, context)


class Upcast(Fsdp2Backend):
    """All parameters made fp32 before they are sharded, as Accelerate does at mixed precision."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(lambda: build_model().float(), build_optimizer, context)
