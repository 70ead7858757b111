"""The job's AdamW with its weight-decay groups, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import nn

from harness.backends.base import OptimizerImplementation
from harness.backends.optimizer_kinds import LOW_BIT
from harness.spec import OptimizerSection, ScheduleSection
from harness.worker.low_bit import build_low_bit
from harness.worker.muon import build_muon

FOREACH_AND_FUSED: dict[OptimizerImplementation, tuple[bool | None, bool | None]] = {
    "default": (None, None),
    "for-loop": (False, False),
    "foreach": (True, False),
    "fused": (False, True),
}
"""Arguments of torch.optim.AdamW."""


def decaying_names(model: nn.Module, optimizer: OptimizerSection) -> frozenset[str]:
    """Names of the parameters that decay. Decided on the whole model: shards lose their dimensions."""
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (optimizer.decay == "all" or parameter.ndim >= 2)
    )


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are not trained."""
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def build_adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    section: OptimizerSection,
    decaying: frozenset[str],
    frozen: frozenset[str] = frozenset(),
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The job's optimizer with every constant explicit; the loop sets the learning rate before each step.

    frozen: names of parameters that it is not given. matrices: names of those that Muon updates.
    """
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    orthogonal: list[nn.Parameter] = []
    of_muon = matrices if section.kind == "muon" else ()
    for name, parameter in named:
        if name in frozen:
            continue
        (orthogonal if name in of_muon else decay if name in decaying else keep).append(parameter)
    groups = [
        {"params": decay, "weight_decay": section.weight_decay},
        {"params": keep, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.kind in LOW_BIT:
        return build_low_bit(groups, section)
    if section.kind == "muon":
        return build_muon(orthogonal, groups, section)
    foreach, fused = FOREACH_AND_FUSED[section.implementation]
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        amsgrad=False,
        foreach=foreach,
        fused=fused,
    )


def learning_rate(step: int, steps: int, optimizer: OptimizerSection, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`.

    Warm-up: peak x (step + 1) / warmup_steps. Then linear or half a cosine from the peak down to
    peak x final_fraction at the last step.
    """
    peak = optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    remaining = max(1, steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    shape = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
