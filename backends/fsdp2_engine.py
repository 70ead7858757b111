"""The engine of FSDP2: what it keeps in addition to its sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from harness.backends.base import TensorKind
from harness.backends.checkpoints.torch_pieces import dtensor_pieces
from harness.backends.gradients import local_shard
from harness.backends.optimizer_groups import held_tensors
from harness.backends.piece import Piece
from harness.backends.torch_engine import TorchEngine


class Fsdp2Engine(TorchEngine):
    """Tells the sharded weights from the gathered ones, which may stand in their place."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        return super().full_parameters()

    def pieces(self) -> Iterator[Piece]:
        self._reshard()
        return dtensor_pieces(self.module.named_parameters(), self.optimizer)

    def weight_pieces(self) -> Iterator[Piece]:
        self._reshard()
        return dtensor_pieces(self.module.named_parameters(), None)

    def _reshard(self) -> None:
        # After a forward pass without a backward pass the module may still hold gathered weights, in
        # the compute dtype, under the names of its parameters.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        for _, held in held_tensors(self.optimizer.state.values()):
            yield "optimizer", held
        for parameter in self._sharded_parameters():
            sharded = parameter.sharded_param
            yield "weights", local_shard(sharded.detach())
            if sharded.grad is not None:
                yield "gradients", local_shard(sharded.grad)
            # Micro-steps without reduction add up unsharded gradients, in the compute or the reduction dtype.
            unsharded = getattr(parameter, "_unsharded_param", None)
            # Between the passes, where units are resharded to fewer ranks.
            if (kept := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                yield "weights", kept
            for gradient in (getattr(unsharded, "grad", None), parameter.unsharded_accumulated_grad):
                if gradient is not None:
                    yield "gradients", local_shard(gradient)
        for gathered in self.gathered_tensors():
            yield "gathered", gathered
        for buffer in self.module.buffers():
            yield "buffers", buffer

    def gathered_tensors(self) -> Iterator[Tensor]:
        for parameter in self._sharded_parameters():
            yield from parameter.all_gather_outputs

    def _sharded_parameters(self) -> Iterator[Any]:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module._get_fsdp_state()):
                    yield from group.fsdp_params


def parameter_groups(state: Any) -> list[Any]:
    """torch 2.13 has a list of groups where 2.11 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
