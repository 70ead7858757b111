"""Which optimizers really step, and the gradients that they are given: whoever built and calls them.

A hook of torch on the step of every optimizer of the process. What updates weights without a torch
optimizer is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.backends.gradients import COUNTED_ELSEWHERE, global_norm, local_shard


class OptimizerWatch:
    """Looks on between `start` and `stop`, in the first steps only: what trains is at work at once."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that stepped, in the order in which they first did."""
        self._handle: Any = None
        self._squares: dict[int, float] = {}
        self._elements: dict[int, int] = {}

    @property
    def at_work(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        """Look on from here."""
        self._squares.clear()
        self._elements.clear()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> tuple[float, int] | None:
        """Stop looking on; return (sum of squares, elements) of this rank's gradients at their last use.

        None: no torch optimizer stepped. Gradients that an optimizer was given twice count once.
        """
        self._handle.remove()
        self._handle = None
        if not self._elements:
            return None
        return sum(self._squares.values()), sum(self._elements.values())

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
        self._elements[key] = local_shard(parameter.detach()).numel()
        if parameter.grad is not None:
            self._squares[key] = global_norm([parameter.grad], None) ** 2
