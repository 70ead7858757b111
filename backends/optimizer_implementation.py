"""Which of torch's three implementations of Adam or SGD an optimizer runs, read back from its own groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach


def optimizer_implementation(optimizer: torch.optim.Optimizer, updated: Sequence[Tensor]) -> str | None:
    """'for-loop', 'foreach' or 'fused', several if groups differ; None if it is neither torch's Adam nor SGD.

    `updated` are tensors that the optimizer updates: where a group leaves the choice open, torch decides by
    their types and devices.
    """
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):
        return None
    found = {_of_group(group, updated) for group in optimizer.param_groups}
    return " and ".join(sorted(found))


def _of_group(group: dict[str, Any], updated: Sequence[Tensor]) -> str:
    """As torch 2.13 dispatches (`optim/adam.py`, `optim/sgd.py`): it never chooses fused by itself."""
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        differentiable = bool(group.get("differentiable"))
        _, foreach = _default_to_fused_or_foreach(list(updated), differentiable, use_fused=False)
    if fused:
        return "fused"
    return "foreach" if foreach else "for-loop"
