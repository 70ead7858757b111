"""torch fully_shard (FSDP2): one unit per block of the model and one for the rest of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from harness.backends.libraries.facts import offloads
from harness.backends.options import unmet_hybrid, unmet_second_copy

from ..base import (
    Backend,
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    TensorKind,
    Unsupported,
    World,
)
from ..checkpoints.torch_pieces import dtensor_pieces
from ..model.blocks import first_trained, parameter_count, refuse_batch_norm, transformer_blocks
from ..model.loading import fill_sharded, hybrid_mesh, this_device
from ..model.precision import cast_parameters, compute_dtype, dtype_name, grad_scaler
from ..model_source import model_source
from ..optimizer.gradients import local_shard
from ..optimizer.groups import held_tensors
from ..options import Fsdp2Options, ReductionOptions, reduces_each
from ..piece import Piece
from ..presets import ROOT_RESHARD, fsdp2_changes, reduce_dtype_changes
from ..strategy import SHARDINGS, Sharding
from ..torch_engine import TorchEngine, TorchStrategy


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


class Fsdp2Backend(Backend):
    """`fully_shard`; with `grad-op` blocks keep their gathered weights for the backward pass."""

    Options: ClassVar[type[BackendOptions]] = Fsdp2Options
    engine_class: ClassVar[type[Fsdp2Engine]] = Fsdp2Engine

    def __init__(self, options: BackendOptions, *, sharding: Sharding = "full-shard") -> None:
        super().__init__(options)
        reshards = SHARDINGS[sharding].reshards
        self.reshard: bool | int = getattr(options, "reshard", None) or reshards
        self.hybrid = SHARDINGS[sharding].has_replicas

    def unmet_requirements(self, world: World) -> list[str]:
        if self.hybrid:
            return unmet_hybrid(world, getattr(self.options, "shard_size", None))
        return unmet_second_copy(world, self.options)

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        source = model_source(build_model)
        model = source() if source.loading == "full" else source.skeleton()
        count = parameter_count(model)
        if isinstance(self.options, Fsdp2Options) and self.options.master_dtype == "compute":
            cast_parameters(model, compute_dtype(context.precision))
        blocks = transformer_blocks(model)
        whole_mesh = self._mesh(context.world)
        mesh = self._cut(model, whole_mesh)
        policy = mixed_precision(context)
        if policy.param_dtype is not None:
            refuse_batch_norm(model, "FSDP2")
        on_host = offloads(self.options)
        if on_host and context.precision == "fp16-mixed" and context.world.device == "cuda":
            raise Unsupported(
                f"torch {torch.__version__}: GradScaler reduces its overflow flag where the gradients "
                "are; offloaded ones lie on the CPU, which NCCL cannot reach"
            )
        arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if on_host:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=context.world.device == "cuda")
        own = self._divide(model, list(blocks.values()), arguments, context)
        if source.loading != "full":
            fill_sharded(model, source, torch.device("cpu") if on_host else this_device(context.world))
        units: list[Any] = list(blocks.values())
        if isinstance(self.options, Fsdp2Options) and self.options.prefetch is not None:
            prefetch_explicitly(model, units, self.options.prefetch)
        strategy = fsdp2_strategy(model, units, mesh, policy, count, on_host, own)
        strategy = replace(
            strategy,
            loading=source.loading,
            details=strategy.details | resharded_to(units, mesh.shape[-1]),
            norm_group=mesh.get_group(mesh.ndim - 1),
            set_synchronisation=partial(synchronise, model),
            reduces_each=reduces_each(self.options),
            gathers_anew=mesh.shape[-1] > 1,
            named_full_parameters=partial(fsdp2_full_parameters, model, mesh.device_type),
        )
        strategy = self._norm(strategy, whole_mesh)
        optimizer = build_optimizer(model.named_parameters())
        return self.engine_class(model, optimizer, context, strategy, grad_scaler(context))

    def _divide(
        self, model: nn.Module, blocks: list[nn.Module], arguments: dict[str, Any], context: SetupContext
    ) -> dict[str, Any]:
        """Make a unit of each block and of the rest; what more of their settings is reported."""
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.reshard, **arguments)
        changes = fsdp2_changes(context.precision, context.preset, reshard=self.reshard)
        root = next((c.value for c in changes if c.setting == ROOT_RESHARD), None)
        fully_shard(model, reshard_after_forward=root, **arguments)
        return {"reshard_after_forward": self.reshard, "root_reshard_after_forward": root}

    def _cut(self, model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
        """Cut the model in another way first, where the mesh says so; the mesh that is left to shard over."""
        return mesh

    def _norm(self, strategy: TorchStrategy, mesh: DeviceMesh) -> TorchStrategy:
        """Tell the gradient norm which ranks hold disjoint parts of the gradient."""
        return strategy

    def _mesh(self, world: World) -> DeviceMesh:
        if not self.hybrid:
            return init_device_mesh(world.device, (world.world_size,), mesh_dim_names=("shard",))
        return hybrid_mesh(world, self.options)


class ReplicateBackend(Fsdp2Backend):
    """`replicate`, torch's composable DDP: FSDP2's units on a mesh of replicas alone."""

    Options: ClassVar[type[BackendOptions]] = ReductionOptions

    def _divide(
        self, model: nn.Module, blocks: list[nn.Module], arguments: dict[str, Any], context: SetupContext
    ) -> dict[str, Any]:
        from torch.distributed._composable.replicate_with_fsdp import replicate  # newer than FSDP2

        for module in (*blocks, model):
            replicate(module, **arguments)
        return {}

    def _norm(self, strategy: TorchStrategy, mesh: DeviceMesh) -> TorchStrategy:
        return of_replicas(strategy, mesh)

    def _mesh(self, world: World) -> DeviceMesh:
        return init_device_mesh(world.device, (world.world_size,), mesh_dim_names=("replicate",))


def of_replicas(strategy: TorchStrategy, mesh: DeviceMesh) -> TorchStrategy:
    """What `replicate` makes of the same units."""
    details = strategy.details | {"shard_size": 1, "replicas": mesh.size()}
    return replace(strategy, name="replicate", norm_group=None, gathers_anew=False, details=details)


def fsdp2_strategy(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    count: int,
    offloads: bool,
    own_config: Mapping[str, Any],
    *,
    autocast: bool = False,
) -> TorchStrategy:
    """What `fully_shard` made of a live model of `count` parameters."""
    compute = policy.param_dtype or first_trained(model).dtype
    config = {
        "mesh": {"shape": list(mesh.shape), "dimensions": list(mesh.mesh_dim_names or ())},
        "mp_policy": {
            key: dtype_name(value) if isinstance(value, torch.dtype) else value
            for key, value in vars(policy).items()
        },
        "offload_policy": "CPUOffloadPolicy" if offloads else None,
    }
    return TorchStrategy(
        name="fully_shard" + (" on a 2-D mesh" if mesh.ndim > 1 else ""),
        native_config={**own_config, **config},
        wrap_units=fsdp2_unit_names(model),
        reduce_dtype=policy.reduce_dtype or compute,
        parameter_count=count,
        compute_dtype=compute,
        autocast=autocast,
        offload=["weights", "gradients", "optimizer"] if offloads else [],
        gather_dtype=compute,
        details={
            "shard_size": mesh.shape[-1],
            "replicas": mesh.size() // mesh.shape[-1],
            **describe_fsdp2_prefetch(units),
        },
    )


def prefetch_explicitly(root: Any, units: Sequence[Any], count: int) -> None:
    """Let each unit gather the next `count` blocks ahead: after it forward, before it backward."""
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])
    # The root's weights are used around the blocks: before the first and after the last.
    root.set_modules_to_forward_prefetch(units[:count])
    root.set_modules_to_backward_prefetch(units[-count:][::-1])


def describe_fsdp2_prefetch(blocks: Sequence[Any]) -> dict[str, Any]:
    """Blocks that are gathered ahead explicitly; 'implicit' where torch decides."""
    states = [block._get_fsdp_state() for block in blocks]
    ahead = max((len(state._states_to_forward_prefetch) for state in states), default=0)
    behind = max((len(state._states_to_backward_prefetch) for state in states), default=0)
    return {"forward_prefetch": ahead or "implicit", "backward_prefetch": behind or "implicit"}


def mixed_precision(context: SetupContext) -> MixedPrecisionPolicy:
    """Compute in the low dtype; reduce in fp32 unless the library's default is asked for."""
    if not context.precision.endswith("-mixed"):
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float32 if reduce_dtype_changes(context.precision, context.preset) else None
    return MixedPrecisionPolicy(param_dtype=compute_dtype(context.precision), reduce_dtype=reduce_dtype)


def synchronise(model: nn.Module, last: bool) -> None:
    """Reduce gradients in this micro-step only if it is the last."""
    model.set_requires_gradient_sync(last)  # type: ignore[operator]
    model.set_is_last_backward(last)  # type: ignore[operator]


def resharded_to(blocks: list[nn.Module], shards: int) -> dict[str, int]:
    """Ranks among which the live blocks leave their weights after the forward pass, if not all `shards`."""
    groups = [g for block in blocks for g in parameter_groups(block._get_fsdp_state())]  # type: ignore[operator]
    sizes = {g.post_forward_mesh_info.shard_mesh_size for g in groups if g.post_forward_mesh_info is not None}
    return {"reshard": sizes.pop()} if len(sizes) == 1 and sizes != {shards} else {}


def fsdp2_unit_names(model: nn.Module) -> list[str]:
    """Names of the live model's units, the root last; of several modules in one unit 'norm + lm_head'."""
    units: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), []).append(name)
    return sorted((" + ".join(names) for names in units.values()), key=lambda name: name == "")


def fsdp2_full_parameters(model: nn.Module, device: str) -> Iterator[tuple[str, Tensor]]:
    """Gather the parameters of a sharded model one by one, on `device`; a collective."""
    for name, parameter in model.named_parameters():
        # Offloaded shards lie on the CPU while NCCL gathers device memory only.
        sharded = parameter.detach().to(device)
        full = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        yield name, full
        del full
