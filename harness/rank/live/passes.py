"""How often a step runs the model forward and backward, and in which mode its modules are meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from harness.rank.live.live_model import bare_module_name

MOST_NAMES = 1000
"""Of modules in another mode than their pass, the record keeps this many."""


class PassWatch:
    """Counts calls of the bare model, and backward passes that reach the loss of a batch.

    What recomputes activations calls blocks and not the model, so it does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._passes = [0, 0]
        self._modes: dict[tuple[bool, bool], list[str]] = {}
        model.register_forward_pre_hook(_counting(self._passes))

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self._passes[:] = [0, 0]

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes since `begin_step`."""
        forward, backward = self._passes
        return forward, backward

    def computed(self, loss: Tensor) -> None:
        """Count each backward pass that will reach this loss."""
        if loss.requires_grad:
            passes = self._passes

            def count(_: Tensor) -> None:
                passes[1] += 1

            loss.register_hook(count)

    def look(self, module: nn.Module) -> None:
        """Note which modules are in another mode than this pass of what wraps the model."""
        # Whoever changes modes changes that of the model itself, so all modules are read once for each.
        trains = torch.is_grad_enabled()
        key = trains, self.model.training
        if key not in self._modes:
            self._modes[key] = list(self._in_mode(module, not trains))[:MOST_NAMES]

    def in_other_mode(self, *, trains: bool) -> list[str] | None:
        """Modules that depend on their mode and had the wrong one in such a pass; None: there was none."""
        looks = [names for (of_pass, _), names in self._modes.items() if of_pass == trains]
        return sorted({name for names in looks for name in names}) if looks else None

    def never_trains(self) -> set[str]:
        """Modules that depend on their mode and were in evaluation mode in every training pass."""
        looks = [set(names) for (of_pass, _), names in self._modes.items() if of_pass]
        return set.intersection(*looks) if looks else set()

    def _in_mode(self, module: nn.Module, training: bool) -> Iterator[str]:
        # The reference computes in a copy of the model at low precision.
        within = any(part is self.model for part in module.modules())
        for name, part in (self.model if within else module).named_modules():
            if part.training == training and depends_on_mode(part):
                yield bare_module_name(name)


def depends_on_mode(module: nn.Module) -> bool:
    """Whether its forward pass asks for its mode; dropout of probability 0 does so in vain."""
    if getattr(module, "p", None) == 0.0 or getattr(module, "drop_prob", None) == 0.0:
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "training" in code.co_names and _has_own_effect(module)


def _has_own_effect(module: nn.Module) -> bool:
    """False: an attention whose only use of its mode is a dropout of 0."""
    rates = [getattr(module, name, None) for name in ("attention_dropout", "dropout")]
    known = [rate for rate in rates if isinstance(rate, int | float)]
    return not known or any(known)


def _counting(passes: list[int]) -> Callable[[nn.Module, Any], None]:
    def count(_: nn.Module, __: Any) -> None:
        if not torch.compiler.is_compiling():  # a number that changes would be compiled anew each time
            passes[0] += 1

    return count
