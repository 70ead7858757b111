"""Pieces of stage 3's states that lie in files: copied out of them, and back. DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.backends.checkpoints.adam import make_states
from harness.backends.checkpoints.zero_pieces import HeldStates, restore_progress, scattered_pieces
from harness.backends.piece import MOMENTS, Piece, Progress
from harness.backends.swapped_weights import in_file, mapped, read_piece, release_read_ahead, write_piece


@dataclass(frozen=True)
class _Copied:
    """Of one sub-group, without a gradient."""

    masters: Tensor
    moments: dict[str, Tensor]


class CopiedStates(HeldStates):
    """Copies of what lies in files, in tensors that the system may keep on disk; the rest is live.

    What is written to them reaches DeepSpeed by `write_back`.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self._engine, self._folder = engine, folder
        self._groups: dict[int, _Copied] = {}
        self._frozen: dict[int, Tensor] = {}

    def masters(self, group: int) -> Tensor:
        return self._copied(group).masters if self._is_swapped(group) else super().masters(group)

    def moments(self, group: int) -> dict[str, Tensor]:
        return self._copied(group).moments if self._is_swapped(group) else super().moments(group)

    def frozen(self, parameter: Any) -> Tensor:
        if not in_file(parameter):
            return super().frozen(parameter)
        if id(parameter) not in self._frozen:
            copy = mapped(self._folder, parameter.ds_tensor.ds_numel, parameter.nvme_swapper.dtype)
            self._frozen[id(parameter)] = read_piece(parameter, copy)
        return self._frozen[id(parameter)]

    def pieces(self) -> Iterator[Piece]:
        """Of all parameters, with moments."""
        return scattered_pieces(self._engine, MOMENTS, self)

    def continue_from(self, progress: Progress) -> None:
        """Write the copies to their files, and the weights in use after them; a collective."""
        optimizer = self._engine.optimizer
        optimizer.checkpoint_event_prologue()  # frees the parameters that stay gathered
        release_read_ahead(self._engine.module.parameters())
        for parameter in self._engine.module.parameters():
            if (copy := self._frozen.get(id(parameter))) is not None:
                write_piece(parameter, copy)
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            if self._is_swapped(group):
                self._write_back(group)
            else:
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()  # gathers them again
        restore_progress(self._engine, progress)

    def _write_back(self, group: int) -> None:
        optimizer, copied = self._engine.optimizer, self._copied(group)
        parameter = optimizer.fp32_partitioned_groups_flat[group]
        optimizer._optimizer_states_and_gradient_swap_in(group)
        make_states(self._engine.basic_optimizer, [parameter])
        state = self._engine.basic_optimizer.state[parameter]
        with torch.no_grad():
            parameter.data.copy_(copied.masters)
            for name, moment in copied.moments.items():
                state[name].data.copy_(moment)
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer._optimizer_states_and_gradient_swap_out(group)

    def _copied(self, group: int) -> _Copied:
        if group not in self._groups:
            self._groups[group] = self._copy(group)
        return self._groups[group]

    def _copy(self, group: int) -> _Copied:
        """Moments that do not exist yet are zeros, as a new file is."""
        optimizer = self._engine.optimizer
        parameter = optimizer.fp32_partitioned_groups_flat[group]
        optimizer._optimizer_states_and_gradient_swap_in(group)
        state = self._engine.basic_optimizer.state.get(parameter, {})
        live = {"masters": parameter.detach()} | {name: state[name] for name in MOMENTS if name in state}
        copies = {
            name: mapped(self._folder, parameter.numel(), parameter.dtype) for name in ("masters", *MOMENTS)
        }
        for name, tensor in live.items():
            copies[name].copy_(tensor)
        optimizer._release_swap_buffers(group)
        return _Copied(copies.pop("masters"), copies)

    def _is_swapped(self, group: int) -> bool:
        return bool(self._engine.optimizer._swappable_optimizer_subgroup(group))
