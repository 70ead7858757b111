"""Tensor parallelism with DTensor: layers cut over ranks, alone or inside the groups of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.backends.base import (
    Backend,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    Unsupported,
    World,
)
from harness.backends.checkpoints.torch_pieces import dtensor_pieces
from harness.backends.fsdp.fsdp2 import Fsdp2Backend, fsdp2_full_parameters
from harness.backends.model.blocks import first_trained, parameter_count
from harness.backends.model.loading import fill_sharded, this_device
from harness.backends.model.precision import grad_scaler
from harness.backends.model_source import model_source
from harness.backends.optimizer.gradients import local_shard
from harness.backends.options import FsdpTensorOptions, TensorOptions
from harness.backends.piece import Piece
from harness.backends.tensor.cut import copies, cut_layers
from harness.backends.torch_engine import TorchEngine, TorchStrategy

from ..fsdp.fsdp2 import Fsdp2Engine


def device_mesh(world: World) -> DeviceMesh:
    """The dimensions of the ranks as torch has them."""
    names = tuple(name for name, _ in world.mesh.sizes)
    return init_device_mesh(world.device, tuple(size for _, size in world.mesh.sizes), mesh_dim_names=names)


class TensorBackend(Backend):
    """Layers cut over the ranks along 'tensor'; gradients averaged over the ranks along 'data'."""

    Options = TensorOptions

    def unmet_requirements(self, world: World) -> list[str]:
        return [] if world.world_size > 1 else ["tensor parallelism needs at least 2 ranks"]

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        _require_precision(context)
        source = model_source(build_model)
        model = source() if source.loading == "full" else source.skeleton()
        count, mesh = parameter_count(model), device_mesh(context.world)
        cut_layers(model, mesh["tensor"])
        device = this_device(context.world)
        if source.loading == "full":
            model.to(device)
        else:
            fill_sharded(model, source, device)
            for module in model.modules():
                module._buffers.update(
                    {name: b.to(device) for name, b in module._buffers.items() if b is not None}
                )
        dtype = first_trained(model).dtype
        strategy = TorchStrategy(
            name="parallelize_module",
            native_config={"mesh": dict(context.world.mesh.sizes)},
            wrap_units=[""],
            reduce_dtype=dtype,
            parameter_count=count,
            compute_dtype=dtype,
            autocast=True,
            offload=[],
            details={},
            loading=source.loading,
            norm_group=mesh["tensor"].get_group(),
            norm_copies=partial(copies, ranks=mesh["tensor"].size()),
            gathers_anew=True,
            named_full_parameters=partial(fsdp2_full_parameters, model, context.world.device),
        )
        optimizer = build_optimizer(model.named_parameters())
        engine = TensorEngine(model, optimizer, context, strategy, grad_scaler(context))
        engine.data_group = mesh["data"].get_group() if mesh["data"].size() > 1 else None
        return engine


class _Gathered(TorchEngine):
    """Columns of a weight are no range of its elements: for digests weights are gathered."""

    def pieces(self) -> Iterator[Piece]:
        data = self.context.world.mesh.size("data")
        place = self.context.world.mesh.coordinates(self.context.world.rank).get("data", 0)
        for piece in dtensor_pieces(self.module.named_parameters(), self.optimizer):
            yield replace(piece, copies=piece.copies * data, copy=piece.copy * data + place)

    def weight_pieces(self) -> Iterator[Piece]:
        raise Unsupported(f"{type(self).__name__}: layers cut by columns are gathered for their digest")


class TensorEngine(_Gathered):
    """Averages gradients over the ranks that hold the same part of the model."""

    data_group: dist.ProcessGroup | None = None
    """None: there is one such rank."""

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        super().backward(loss, last_micro_step=last_micro_step)
        for parameter in self.module.parameters():
            gradient = parameter.grad
            # The backward pass of an embedding leaves the gradient whole on every rank (torch 2.13).
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if last_micro_step and self.data_group is not None:
            for gradient in map(local_shard, self._gradients()):
                # gloo has no average.
                dist.all_reduce(gradient, group=self.data_group)
                gradient /= self.data_group.size()


class FsdpTensorEngine(_Gathered, Fsdp2Engine):
    """FSDP2 of layers that are cut."""


class FsdpTensorBackend(Fsdp2Backend):
    """`fully_shard` along 'shard' of a model whose layers are cut along 'tensor'."""

    Options = FsdpTensorOptions
    engine_class = FsdpTensorEngine

    def unmet_requirements(self, world: World) -> list[str]:
        mesh = self.options.mesh(world.world_size)
        return [] if mesh.size("shard") > 1 else [f"{mesh} leaves nothing to shard; take tp, or more ranks"]

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        _require_precision(context)
        return super().prepare(build_model, build_optimizer, context)

    def _mesh(self, world: World) -> DeviceMesh:
        return device_mesh(world)

    def _cut(self, model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
        cut_layers(model, mesh["tensor"])
        return mesh["shard"]

    def _norm(self, strategy: TorchStrategy, mesh: DeviceMesh) -> TorchStrategy:
        return replace(strategy, norm_group=dist.group.WORLD, norm_copies=partial(copies, ranks=mesh.size()))


def _require_precision(context: SetupContext) -> None:
    if context.precision == "fp16-mixed":
        raise Unsupported(
            f"torch {torch.__version__}: GradScaler's overflow flag is not reduced over tensor-parallel ranks"
        )
