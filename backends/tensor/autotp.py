"""DeepSpeed AutoTP: layers cut over neighbouring ranks, ZeRO over the ranks that hold the same parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import Effective, SetupContext, Unsupported
from harness.backends.model_source import Loading
from harness.backends.optimizer.gradients import COUNTED_RANGES
from harness.backends.piece import Columns, Piece
from harness.backends.tensor.backend import require_plan
from harness.backends.tensor.plan import autotp_cut_dimension, part_sizes
from harness.backends.zero.backend import ZeroBackend
from harness.backends.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from types import ModuleType

GROUPS = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")
"""Where `deepspeed.utils.groups` (0.19.8) keeps its account of the ranks for the whole process."""


class AutoTpEngine(ZeroEngine):
    """Puts the parts of layers together where whole parameters are asked for."""

    def __init__(self, engine: Any, context: SetupContext, *rest: Any) -> None:
        super().__init__(engine, context, *rest)
        # Broadcasts the pickled first batch to compare it; the harness compares what ranks were fed.
        engine.first_dataloader_check.remove()
        if self._place > 0:
            self._leave_out_copies()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in super().full_parameters():
            yield name, self._whole(name, part)

    def _unsharded_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in super()._unsharded_gradients():
            yield name, self._whole(name, part)

    def pieces(self) -> Iterator[Piece]:
        ranks = self.context.world.mesh.size("tensor")
        for piece in super().pieces():
            dimension = autotp_cut_dimension(piece.name)
            if dimension is None:
                yield replace(piece, copies=piece.copies * ranks, copy=piece.copy * ranks + self._place)
                continue
            size = self._size_of(piece.name, dimension)
            before = sum(part_sizes(size, ranks)[: self._place])
            shape = tuple(size if i == dimension else held for i, held in enumerate(piece.shape))
            if dimension == 0:
                first = before * math.prod(shape[1:]) if piece.weight.numel() else 0
                yield replace(piece, shape=shape, start=piece.start + first)
            else:
                yield replace(piece, shape=shape, columns=Columns(first=before, count=piece.shape[1]))

    def weight_pieces(self) -> Iterator[Piece]:
        raise Unsupported(f"{type(self).__name__}: layers cut by columns are gathered for their digest")

    def effective(self) -> Effective:
        found = super().effective()
        return replace(found, strategy=f"AutoTP with {found.strategy}")

    def close(self) -> None:
        """Let the next engine of this process have groups of its own."""
        from deepspeed.utils import groups

        super().close()
        for name in GROUPS:
            setattr(groups, name, None)

    @property
    def _place(self) -> int:
        """This rank's number among those that cut its layers."""
        world = self.context.world
        return world.mesh.coordinates(world.rank)["tensor"]

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """A parameter, or its gradient, from what each rank along 'tensor' holds; fp32 on the CPU."""
        dimension = autotp_cut_dimension(name)
        if dimension is None:
            return part
        from deepspeed.utils import groups

        ranks = self.context.world.mesh.size("tensor")
        sizes = part_sizes(self._size_of(name, dimension), ranks)
        # Parts are gathered in one size: gloo takes no others.
        own = part.to(self.engine.device).movedim(dimension, 0)
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=groups.get_tensor_model_parallel_group())
        rows = [held[:size] for held, size in zip(parts, sizes, strict=True)]
        return torch.cat(rows).movedim(0, dimension).contiguous().cpu()

    def _size_of(self, name: str, dimension: int) -> int:
        """Size of a whole parameter along a dimension, as AutoTP notes it on what it cuts."""
        from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

        notes = getattr(self.engine.module.get_parameter(name), DS_AUTOTP_UC_META)
        return int(notes["logical_shape"][dimension])

    def _leave_out_copies(self) -> None:
        """Mark what of the flat parameters only this rank holds, so that what peers hold too counts once."""
        optimizer = self.engine.optimizer
        own: dict[int, list[tuple[int, int]]] = {}
        for name, parameter in self.engine.module.named_parameters():
            if autotp_cut_dimension(name) is None:
                continue
            if self.stage == 3:
                group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            elif parameter._hp_mapping is not None:
                group = parameter._hp_mapping.param_group_index
                address = parameter._hp_mapping.hp_fragment_address
                start, length = address.start, address.numel
            else:
                continue
            own.setdefault(group, []).append((start, start + length))
        flat = (
            optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        for group, tensor in enumerate(flat):
            setattr(tensor, COUNTED_RANGES, own.get(group, []))


class AutoTpBackend(ZeroBackend):
    """ZeRO along 'data' of a model whose layers DeepSpeed cuts along 'tensor'."""

    engine_class = AutoTpEngine

    def _loading(self, asked: Loading) -> Loading:
        """Every rank builds the whole model: DeepSpeed cuts weights that are there."""
        return "full"

    def _parallel_groups(self, deepspeed: ModuleType, model: nn.Module, context: SetupContext) -> Any:
        """Nothing: DeepSpeed makes the groups itself. Raises Unsupported where its plan does not fit."""
        ranks = context.world.mesh.size("tensor")
        require_plan(model, ranks)
        if not getattr(model, "_tp_plan", None):
            raise Unsupported(
                f"DeepSpeed {deepspeed.__version__}, AutoTP: transformers has no plan for "
                f"{type(model).__name__}, and cutting by names of layers alone was not validated"
            )

    def _configuration(self, model: nn.Module, count: int, context: SetupContext) -> dict[str, Any]:
        return super()._configuration(model, count, context) | {
            "tensor_parallel": {
                "autotp_size": context.world.mesh.size("tensor"),
                # Else DeepSpeed cuts the logits of tied weights and replaces the model's loss by its own.
                "vocab_parallel_lm_head": False,
            }
        }
