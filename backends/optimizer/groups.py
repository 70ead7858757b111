"""Groups and states of a live optimizer, whatever its class: the one place that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from harness.backends.optimizer.gradients import stored_tensors

LR_SCALE = "lr_scale"
"""Key of a group: its learning rate over the job's; absent: 1."""
CONSTANTS = (
    LR_SCALE, "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "momentum",
    "dampening", "nesterov", "alpha", "rho", "beta1", "decay_rate", "clip_threshold", "scale_parameter",
    "relative_step",
)  # fmt: skip
"""Of a group, what changes the update: of AdamW, SGD, RMSprop, Adafactor, Lion and their like."""


def describe_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The constants of each parameter group that change the update, read from the live optimizer.

    Order of groups and keys is fixed; the learning rate is left out, since the loop sets it each step.
    """
    return [group_constants(group) for group in optimizer.param_groups]


def group_constants(group: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of one group as a document."""
    return {key: _plain(group[key]) for key in CONSTANTS if key in group}


def group_rate(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a group; None: it has no number, as where Adafactor derives its own."""
    rate = group.get("lr")
    try:
        return None if rate is None else float(rate)
    except (TypeError, ValueError):
        return None


def set_rates(optimizer: Any, rate: float) -> None:
    """Give every group of an optimizer its share of the job's learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = _own_rate(group, rate)


def _own_rate(group: Mapping[str, Any], rate: float) -> float:
    return rate * float(group.get(LR_SCALE, 1.0))


def uses_rate(group: Mapping[str, Any], asked: float) -> bool:
    """Whether a group has its share of the job's learning rate of a step."""
    return group_rate(group) == _own_rate(group, asked)


def rate_in_force(optimizers: Iterable[Any], asked: float) -> float | None:
    """Learning rate, over its group's share, that is farthest from what was asked; None: no group has one."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [
        asked if uses_rate(group, asked) else rate / float(group.get(LR_SCALE, 1.0))
        for group in groups
        if (rate := group_rate(group)) is not None
    ]
    return max(rates, key=lambda rate: abs(rate - asked), default=None)


def updated_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What an optimizer was given to update, group by group; any group may be empty."""
    for group in optimizer.param_groups:
        yield from group["params"]


def held_tensors(states: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that lie in this rank's memory of the states of an optimizer, each with its name.

    Optimizers may nest them, as LBFGS does in lists.
    """
    for state in states:
        for key, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in tensors_in(value):
                for held in stored_tensors(tensor):
                    yield str(key), held


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def optimizer_implementation(optimizer: torch.optim.Optimizer, updated: Sequence[Tensor]) -> str | None:
    """'for-loop', 'foreach' or 'fused', several if groups differ; None if it is neither torch's Adam nor SGD.

    `updated` are tensors that the optimizer updates: where a group leaves the choice open, torch decides by
    their types and devices.
    """
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        return None
    found = {_implementation_of(group, updated) for group in optimizer.param_groups}
    return " and ".join(sorted(found))


def _implementation_of(group: dict[str, Any], updated: Sequence[Tensor]) -> str:
    """As torch 2.13 dispatches (`optim/adam.py`, `optim/sgd.py`): it never chooses fused by itself."""
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        differentiable = bool(group.get("differentiable"))
        _, foreach = _default_to_fused_or_foreach(list(updated), differentiable, use_fused=False)
    if fused:
        return "fused"
    return "foreach" if foreach else "for-loop"
