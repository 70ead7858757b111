"""The job's AdamW with its weight-decay groups, and its learning rate at every step."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from functools import lru_cache

import torch
from torch import nn

from harness.backends.base import OptimizerImplementation
from harness.backends.optimizer_kinds import LOW_BIT
from harness.errors import JobError
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


@lru_cache(maxsize=1)
def scheduled_rates(
    steps: int, peak: float, warmup_steps: int, scheduler: str, parameters: str
) -> tuple[float, ...]:
    """The rate of each step from DeepSpeed's own scheduler, or torch's. `parameters`: JSON.

    Raises JobError for arguments that it does not take.
    """
    from deepspeed.runtime import lr_schedules

    left_to_the_job = {"warmup_min_lr": 0.0, "warmup_max_lr": peak, "warmup_num_steps": warmup_steps,
                       "total_num_steps": steps}  # fmt: skip
    given = {name: left_to_the_job.get(name, value) if value == "auto" else value
             for name, value in json.loads(parameters).items()}  # fmt: skip
    is_deepspeed = hasattr(lr_schedules, scheduler)
    made = getattr(lr_schedules if is_deepspeed else torch.optim.lr_scheduler, scheduler, None)
    if made is None:
        raise JobError(f"schedule.scheduler: neither DeepSpeed nor torch has '{scheduler}'")
    update = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    rates = []
    try:
        steered = made(update, **given)
        if is_deepspeed:  # its first step leads to iteration 0
            steered.step()
        for _ in range(steps):
            rates.append(float(update.param_groups[0]["lr"]))
            update.step()  # torch warns of a scheduler that steps before its optimizer
            steered.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise JobError(f"schedule.parameters: {scheduler} refuses {given}: {error}") from error
    return tuple(rates)


def learning_rate(step: int, steps: int, optimizer: OptimizerSection, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`.

    Warm-up: peak x (step + 1) / warmup_steps. Then linear or half a cosine from the peak down to
    peak x final_fraction at the last step. Of kind deepspeed: what the scheduler gives for iteration `step`.
    """
    peak = optimizer.learning_rate
    if schedule.scheduler is not None:
        return scheduled_rates(steps, peak, schedule.warmup_steps, schedule.scheduler,
                               json.dumps(schedule.parameters))[step]  # fmt: skip
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    remaining = max(1, steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    shape = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
