"""What FSDP2 keeps beside its sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from backends.base import TensorKind
from backends.torch_engine import TorchEngine


class Fsdp2Engine(TorchEngine):
    """Adds the gathered weights and the unsharded gradients that accumulation keeps alive."""

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        yield from super().state_tensors()
        for module in self.module.modules():
            state = getattr(module, "_get_fsdp_state", None)
            if state is None:
                continue
            for group in _parameter_groups(state()):
                for parameter in group.fsdp_params:
                    for gathered in parameter.all_gather_outputs:
                        yield "gathered", gathered
                    if parameter.unsharded_accumulated_grad is not None:
                        yield "gradients", parameter.unsharded_accumulated_grad


def _parameter_groups(state: Any) -> list[Any]:
    """torch 2.13 has a list of groups where 2.11 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
