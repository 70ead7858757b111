"""Which optimizers really step, and the gradients that they are given: whoever built and calls them.

A hook of torch on the step of every optimizer of the process. What updates weights without a torch
optimizer is not seen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.backends.gradients import COUNTED_ELSEWHERE, COUNTED_RANGES, global_norm, local_shard


class OptimizerWatch:
    """Looks on between `start` and `stop`, in the first steps only: what trains is at work at once."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that stepped, in the order in which they first did."""
        self._handle: Any = None
        self._squares: dict[int, float] = {}
        self._elements: dict[int, int] = {}
        self._shares: dict[int, float | None] = {}

    @property
    def at_work(self) -> bool:
        return self._handle is not None

    @property
    def with_gradient(self) -> int:
        """Tensors that had a gradient at their last use since `start`."""
        return len(self._squares)

    def start(self) -> None:
        """Look on from here."""
        self._squares.clear()
        self._elements.clear()
        self._shares.clear()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> tuple[float, float] | None:
        """Stop looking on; return (sum of squares, elements) of this rank's gradients at their last use.

        None: no torch optimizer stepped. Gradients that an optimizer was given twice count once. Of
        DTensors, what several ranks hold counts in part on each: some may be cut, others replicated.
        """
        self._handle.remove()
        self._handle = None
        if not self._elements:
            return None
        known = None not in self._shares.values()
        share = {key: (value or 1.0) if known else 1.0 for key, value in self._shares.items()}
        squares = sum(size * share[key] for key, size in self._squares.items())
        return squares, sum(count * share[key] for key, count in self._elements.items())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # After and not before: hooks of the optimizer itself may change gradients in between.
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Tensor) and not getattr(parameter, COUNTED_ELSEWHERE, False):
                    self._look_at(parameter)

    def _look_at(self, parameter: Tensor) -> None:
        key = id(parameter)
        local = local_shard(parameter.detach())
        ranges = getattr(parameter, COUNTED_RANGES, [(0, local.numel())])
        self._elements[key] = sum(end - start for start, end in ranges)
        self._shares[key] = _share(parameter)
        if parameter.grad is None:
            return
        whole = ranges == [(0, local.numel())]
        parts = [parameter.grad] if whole else [parameter.grad.view(-1)[slice(*part)] for part in ranges]
        self._squares[key] = global_norm(parts, None) ** 2


def _share(parameter: Tensor) -> float | None:
    """One over the ranks that hold the same part of a DTensor; None: another tensor."""
    placements, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
    if placements is None or mesh is None or not dist.is_initialized():
        return None
    cuts = (size for placed, size in zip(placements, mesh.shape, strict=True) if not placed.is_replicate())
    return math.prod(cuts) / dist.get_world_size()
