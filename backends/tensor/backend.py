"""Tensor parallelism with DTensor: layers cut over ranks, alone or inside the groups of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as parallelize

from harness.backends import base
from harness.backends.checkpoints.torch_pieces import dtensor_pieces
from harness.backends.fsdp.fsdp2 import Fsdp2Backend, fsdp2_full_parameters
from harness.backends.libraries.facts import installed_version
from harness.backends.model.blocks import first_trained, parameter_count
from harness.backends.model.loading import fill_sharded, this_device
from harness.backends.model.precision import grad_scaler
from harness.backends.model_source import model_source
from harness.backends.optimizer.gradients import local_shard
from harness.backends.options import FsdpTensorOptions, TensorOptions
from harness.backends.piece import Piece
from harness.backends.tensor.plan import COLUMNS, ROWS, VOCABULARY, cut_dimension, why_not_cut
from harness.backends.torch_engine import TorchEngine, TorchStrategy

from ..fsdp.fsdp2 import Fsdp2Engine

KNOWN_STYLES = {
    **dict.fromkeys(COLUMNS, ("colwise",)),
    **dict.fromkeys(ROWS, ("rowwise",)),
    "lm_head": ("colwise_gather_output", "colwise_rep"),
    "embed_tokens": ("rowwise", "embedding_rowwise"),
}
"""What transformers calls the cuts of `tensor_plan`."""


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut `model` over the ranks of `mesh`, of one dimension; it may lie on the meta device.

    Every parameter becomes a DTensor: those that are not cut are replicated, so that optimizers meet one kind
    of tensor. Nothing is communicated: each rank keeps its part of weights that are the same on all.
    Raises Unsupported where the plan does not fit the model.
    """
    ranks = mesh.size()
    require_plan(model, ranks)
    shared = _shared_parameters(model)
    for parent in _parents(model):
        parallelize(parent, mesh, _SharedInput(), src_data_rank=None)
    for name, module in list(model.named_modules()):
        if any(True for _ in module.parameters(recurse=False)):
            parallelize(module, mesh, _style(name, module, ranks), src_data_rank=None)
    for (module, name), *others in shared:
        for other, as_named in others:
            other.register_parameter(as_named, getattr(module, name))


def _style(name: str, module: nn.Module, ranks: int) -> ParallelStyle:
    layer = name.rpartition(".")[2]
    if layer in COLUMNS:
        return ColwiseParallel()
    if layer in ROWS:
        return RowwiseParallel()
    if layer in VOCABULARY and cut_dimension(f"{name}.weight", module.weight.shape, ranks) == 0:  # type: ignore[arg-type,union-attr]
        if isinstance(module, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel(output_layouts=Replicate())
    return _Replicated()


class _Replicated(ParallelStyle):
    """Every rank holds the module whole and computes all of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def as_dtensors(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(_replicated(value, device_mesh) for value in inputs)

        def as_tensor(_: nn.Module, __: Any, output: Any) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        module.register_forward_pre_hook(as_dtensors)
        module.register_forward_hook(as_tensor)
        return module


class _SharedInput(ParallelStyle):
    """Makes the hidden states of a module one DTensor, whose gradient is reduced once.

    `ColwiseParallel` alone has each of the linear layers that read them reduce its own part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def convert(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (_replicated(args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": _replicated(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(convert, with_kwargs=True)
        return module


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return value


def _parents(model: nn.Module) -> list[nn.Module]:
    """Modules whose children cut their outputs: attention and feed-forward layers."""
    return [m for m in model.modules() if any(name in COLUMNS for name, _ in m.named_children())]


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places of each parameter that several modules share: a style replaces it in one place only."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def require_plan(model: nn.Module, ranks: int) -> None:
    """Raise Unsupported for a model that the plan does not fit."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if (reason := why_not_cut(shapes, config.to_dict() if config is not None else {}, ranks)) is not None:
        raise base.Unsupported(f"{kind}: {reason}")
    _require_same_as_transformers(model)
    for parent in _parents(model):
        for name, module in parent.named_modules():
            if name and name not in (*COLUMNS, *ROWS) and any(True for _ in module.parameters(recurse=False)):
                raise base.Unsupported(
                    f"{kind}: {type(parent).__name__}.{name} computes on a part of the heads or channels; "
                    "the plan does not know how its gradient is reduced"
                )
    for name, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if own and any(True for _ in module.children()):
            raise base.Unsupported(f"{kind}: {name or 'the model itself'} holds parameters beside its layers")
        if any(not parameter.requires_grad for _, parameter in own):
            raise base.Unsupported(
                "tensor parallelism trains whole models only; frozen weights have no plan here"
            )


def _require_same_as_transformers(model: nn.Module) -> None:
    """Refuse a model for which transformers plans something else."""
    planned = dict(getattr(model, "_tp_plan", None) or {})
    planned |= getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    for pattern, style in planned.items():
        layer = pattern.rpartition(".")[2]
        if style not in KNOWN_STYLES.get(layer, ()):
            raise base.Unsupported(
                f"transformers {installed_version('transformers')} plans '{style}' for {pattern} of "
                f"{type(model).__name__}, torch {torch.__version__}'s styles here are colwise and rowwise"
            )


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` hold the same part of a parameter or gradient as this one."""
    if not isinstance(tensor, DTensor):
        return ranks
    parts = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        parts *= 1 if placement.is_replicate() else size  # FSDP2's `_StridedShard` is no `Shard`
    return ranks // parts


def device_mesh(world: base.World) -> DeviceMesh:
    """The dimensions of the ranks as torch has them."""
    names = tuple(name for name, _ in world.mesh.sizes)
    return init_device_mesh(world.device, tuple(size for _, size in world.mesh.sizes), mesh_dim_names=names)


class TensorBackend(base.Backend):
    """Layers cut over the ranks along 'tensor'; gradients averaged over the ranks along 'data'."""

    Options = TensorOptions

    def unmet_requirements(self, world: base.World) -> list[str]:
        return [] if world.world_size > 1 else ["tensor parallelism needs at least 2 ranks"]

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
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
        raise base.Unsupported(f"{type(self).__name__}: layers cut by columns are gathered for their digest")


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

    def unmet_requirements(self, world: base.World) -> list[str]:
        mesh = self.options.mesh(world.world_size)
        return [] if mesh.size("shard") > 1 else [f"{mesh} leaves nothing to shard; take tp, or more ranks"]

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        _require_precision(context)
        return super().prepare(build_model, build_optimizer, context)

    def _mesh(self, world: base.World) -> DeviceMesh:
        return device_mesh(world)

    def _cut(self, model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
        cut_layers(model, mesh["tensor"])
        return mesh["shard"]

    def _norm(self, strategy: TorchStrategy, mesh: DeviceMesh) -> TorchStrategy:
        return replace(strategy, norm_group=dist.group.WORLD, norm_copies=partial(copies, ranks=mesh.size()))


def _require_precision(context: base.SetupContext) -> None:
    if context.precision == "fp16-mixed":
        raise base.Unsupported(
            f"torch {torch.__version__}: GradScaler's overflow flag is not reduced over tensor-parallel ranks"
        )
