"""torch FullyShardedDataParallel (FSDP1) in its sharding strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from harness.backends import base
from harness.backends.checkpoints.torch_pieces import flat_parameter_pieces
from harness.backends.libraries.facts import offloads
from harness.backends.model.blocks import (
    first_trained,
    parameter_count,
    refuse_complex,
    takes_tokens,
    transformer_blocks,
)
from harness.backends.model.loading import fill_fsdp1, hybrid_mesh, reserve_parameters, this_device
from harness.backends.model.precision import compute_dtype, dtype_name, scaler_arguments
from harness.backends.model_source import model_source
from harness.backends.options import Fsdp1Options, reduces_each, unmet_hybrid, unmet_shards_on_host
from harness.backends.piece import Piece
from harness.backends.presets import reduce_dtype_changes
from harness.backends.strategy import FSDP1_STRATEGIES, SHARDINGS, Sharding
from harness.backends.torch_engine import TorchEngine, TorchStrategy, full_tensor

STRATEGIES = {sharding: ShardingStrategy[name] for sharding, name in FSDP1_STRATEGIES.items()}


_BACKWARD = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


class Fsdp1Backend(base.Backend):
    """FullyShardedDataParallel with original parameters, one unit per transformer block and a root."""

    Options: ClassVar[type[base.BackendOptions]] = Fsdp1Options

    def __init__(self, options: base.BackendOptions, *, sharding: Sharding = "full-shard") -> None:
        super().__init__(options)
        self.strategy = STRATEGIES[sharding]
        self._hybrid = SHARDINGS[sharding].has_replicas
        self._wraps_whole_model = getattr(options, "auto_wrap", None) == "none"

    def unmet_requirements(self, world: base.World) -> list[str]:
        unmet = []
        if self._hybrid:
            unmet += unmet_hybrid(world, getattr(self.options, "shard_size", None))
        if world.device == "cpu" and offloads(self.options):
            unmet.append(
                f"CPUOffload of FSDP1 needs an accelerator to offload from (torch {torch.__version__})"
            )
        return unmet + unmet_shards_on_host(self.options)

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        source = model_source(build_model)
        shards = self.strategy is not ShardingStrategy.NO_SHARD and context.world.world_size > 1
        loading = source.loading if shards else "full"
        model = source() if loading == "full" else source.skeleton()
        count = parameter_count(model)
        tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
        refuse_complex(model, "FSDP1")
        refuse_several_dtypes(model)
        precision = fsdp1_mixed_precision(context)
        if precision is not None and not takes_tokens(model):
            # By default only the root's inputs are cast. ViT widens them again, to the dtype that the weight
            # of its first unit has before this is gathered.
            precision = replace(precision, cast_forward_inputs=True)
        arguments = self._arguments(model, precision, context.world)
        if loading != "full":
            reserve_parameters(model)
        fsdp = FullyShardedDataParallel(model, **arguments)
        if loading != "full":
            fill_fsdp1(fsdp, source)
        is_sharded = fsdp.sharding_strategy is not ShardingStrategy.NO_SHARD
        if tied and not is_sharded and precision is not None and context.accumulation_steps > 1:
            raise base.Unsupported(
                f"torch {torch.__version__}: FSDP1 NO_SHARD at mixed precision cannot accumulate gradients "
                "of tied parameters; under no_sync it shares a low-precision gradient with an fp32 parameter"
            )
        strategy = replace(
            fsdp1_strategy(fsdp, {key: _plain(value) for key, value in arguments.items()}, count),
            requested_name=self.strategy.name,
            loading=loading,
            reduces_each=reduces_each(self.options),
        )
        optimizer = build_optimizer(
            (_bare_name(name), parameter) for name, parameter in fsdp.named_parameters()
        )
        scaler = None
        if context.precision == "fp16-mixed":
            refuse_fused(optimizer)
            scaler = ShardedGradScaler(context.world.device, **scaler_arguments(context.loss_scale))  # type: ignore[arg-type]
        return Fsdp1Engine(fsdp, optimizer, context, strategy, scaler)

    def _arguments(
        self, model: nn.Module, precision: MixedPrecision | None, world: base.World
    ) -> dict[str, Any]:
        """Arguments of FullyShardedDataParallel."""
        blocks = transformer_blocks(model)
        arguments: dict[str, Any] = {
            "sharding_strategy": self.strategy,
            "auto_wrap_policy": None
            if self._wraps_whole_model
            else ModuleWrapPolicy({type(block) for block in blocks.values()}),
            "use_orig_params": True,
            "device_id": this_device(world),
        }
        if isinstance(self.options, Fsdp1Options):
            given = {name: getattr(self.options, name) for name in ("forward_prefetch", "limit_all_gathers")}
            arguments |= {name: value for name, value in given.items() if value is not None}
            if self.options.backward_prefetch is not None:
                arguments["backward_prefetch"] = _BACKWARD[self.options.backward_prefetch]
        if self._hybrid:
            arguments["device_mesh"] = hybrid_mesh(world, self.options)
        if precision is not None:
            arguments["mixed_precision"] = precision
        if offloads(self.options):
            arguments["cpu_offload"] = CPUOffload(offload_params=True)
        return arguments


def describe_fsdp1_prefetch(fsdp: FullyShardedDataParallel) -> dict[str, Any]:
    """When a wrapped model gathers weights ahead."""
    backward = fsdp.backward_prefetch
    return {
        "forward_prefetch": fsdp.forward_prefetch,
        "backward_prefetch": backward.name if backward else "none",
        "limit_all_gathers": fsdp.limit_all_gathers,
    }


def fsdp1_strategy(
    fsdp: FullyShardedDataParallel, native_config: dict[str, Any], count: int, *, autocast: bool = False
) -> TorchStrategy:
    """What runs, as the live model says."""
    in_force, precision = fsdp.sharding_strategy, fsdp.mixed_precision
    is_sharded = in_force is not ShardingStrategy.NO_SHARD
    dtype = first_trained(fsdp).dtype
    compute = precision.param_dtype or dtype
    return TorchStrategy(
        name=in_force.name,
        native_config=native_config,
        wrap_units=fsdp1_unit_names(fsdp),
        reduce_dtype=precision.reduce_dtype or compute,
        parameter_count=count,
        compute_dtype=compute,
        autocast=autocast,
        offload=["weights", "gradients", "optimizer"] if fsdp.cpu_offload.offload_params else [],
        gather_dtype=compute if is_sharded else None,
        details={
            "shard_size": torch.distributed.get_world_size(fsdp.process_group) if is_sharded else 1,
            **describe_fsdp1_prefetch(fsdp),
        },
        norm_group=fsdp.process_group if is_sharded else None,
        skip_synchronisation=fsdp.no_sync,
        named_full_parameters=partial(fsdp1_full_parameters, fsdp),
    )


class Fsdp1Engine(TorchEngine):
    """Counts the flat parameters of FSDP1 rather than the views that stand for the originals."""

    def pieces(self) -> Iterator[Piece]:
        return flat_parameter_pieces(self.module, self.optimizer)

    def weight_pieces(self) -> Iterator[Piece]:
        return flat_parameter_pieces(self.module, None)

    def _unsharded_gradients(self) -> Iterator[tuple[str, Tensor]]:
        with FullyShardedDataParallel.summon_full_params(self.module, writeback=False, with_grads=True):
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    yield _bare_name(name), full_tensor(parameter.grad)

    def state_tensors(self) -> Iterator[tuple[base.TensorKind, Tensor]]:
        for kind, tensor in super().state_tensors():
            if kind != "weights":
                yield kind, tensor
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            flat = unit._flat_param
            if flat is None:
                continue
            yield "weights", getattr(flat, "_local_shard", flat.data)
            for name in ("_mp_shard", "_full_param_padded", "_full_prec_full_param_padded"):
                gathered = getattr(flat, name, None)
                if isinstance(gathered, Tensor):
                    yield "gathered", gathered
            if flat.grad is not None:
                yield "gradients", flat.grad
            saved = getattr(flat, "_saved_grad_shard", None)
            if isinstance(saved, Tensor):
                yield "gradients", saved


def refuse_several_dtypes(model: nn.Module) -> None:
    """Raise Unsupported for a model whose units would flatten parameters of several dtypes."""
    dtypes = sorted({dtype_name(parameter.dtype) for parameter in model.parameters()})
    if len(dtypes) > 1:
        raise base.Unsupported(
            f"torch {torch.__version__}: FSDP1 flattens the parameters of a unit into one tensor of one "
            f"dtype; this model has {' and '.join(dtypes)}: set adapter.base_dtype=null, or use fsdp"
        )


def refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise Unsupported for a fused AdamW under a ShardedGradScaler.

    torch 2.13: its `unscale_` makes `found_inf` with one dimension, and `_fused_adam` subtracts that in place
    from step counts that have none. `torch.amp.GradScaler` makes a scalar.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise base.Unsupported(
            f"torch {torch.__version__}: the ShardedGradScaler of FSDP1 fails with a fused AdamW; set "
            "optimizer.implementation to foreach or for-loop"
        )


def fsdp1_mixed_precision(context: base.SetupContext) -> MixedPrecision | None:
    """Compute in the low dtype; reduce in fp32 unless the library's default is asked for."""
    if not context.precision.endswith("-mixed"):
        return None
    reduce_dtype = torch.float32 if reduce_dtype_changes(context.precision, context.preset) else None
    return MixedPrecision(param_dtype=compute_dtype(context.precision), reduce_dtype=reduce_dtype)


def fsdp1_full_parameters(fsdp: FullyShardedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Gather the parameters of a sharded model unit by unit, the root first; a collective."""
    for unit_name, unit in list(fsdp.named_modules()):
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        prefix = _bare_name(f"{unit_name}.") if unit_name else ""
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            flat = unit._flat_param
            for name, own in zip(flat._fqns, flat._param_infos, strict=True) if flat is not None else ():
                yield prefix + name, getattr(own.module, own.param_name)


def _bare_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def fsdp1_unit_names(fsdp: FullyShardedDataParallel) -> list[str]:
    """Names of the live model's units, the root last."""
    units = [n for n, m in fsdp.named_modules() if isinstance(m, FullyShardedDataParallel)]
    return [_bare_name(name) for name in units if name] + [""]


def _plain(value: Any) -> Any:
    """Describe an FSDP1 argument in JSON terms."""
    if isinstance(value, ShardingStrategy):
        return value.name
    if isinstance(value, ModuleWrapPolicy):
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in value._module_classes)})"
    if isinstance(value, MixedPrecision):
        return {
            key: dtype_name(v) if isinstance(v, torch.dtype) else v
            for key, v in vars(value).items()
            if v is None or isinstance(v, (bool, torch.dtype))
        }
    if isinstance(value, BackwardPrefetch):
        return value.name
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
