"""Optimizers of a user's own."""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """X. Chen et al., arXiv 2302.06675, softened to keep updates smooth: tanh in place of the sign."""

    def __init__(self, groups: list[dict[str, Any]], beta: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["average"].lerp(parameter.grad, 1 - group["beta"])
                parameter.add_(torch.tanh(100 * update), alpha=-group["lr"])
                state["average"].lerp_(parameter.grad, 0.01)


def lion(groups: list[dict[str, Any]], beta: float = 0.9) -> Lion:
    return Lion(groups, beta)


def no_optimizer(groups: list[dict[str, Any]]) -> str:
    return "lion"


def of_some(groups: list[dict[str, Any]]) -> Lion:
    return Lion([{**groups[0], "params": groups[0]["params"][:1]}], 0.9)
