"""A backend's strategy in terms of torch, DeepSpeed and Accelerate: the values that a program needs."""

from __future__ import annotations

from typing import Any

from harness.backends import registry
from harness.backends.base import BackendOptions, Preset, SetupContext, World
from harness.backends.hybrid import shard_size
from harness.backends.options import ZeroOptions, gathers_blocks
from harness.backends.presets import ROOT_RESHARD, ddp_changes, fsdp2_changes, reduce_dtype_changes
from harness.backends.strategy import FSDP1_STRATEGIES, StrategyKind
from harness.backends.zero_config import zero_config
from harness.errors import HarnessError
from harness.job.batch import BatchLayout
from harness.job.job import Job

"""torch's names of FSDP1's strategies."""
LOW_DTYPES = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def strategy_of(label: str) -> StrategyKind:
    """Raises HarnessError for a backend that no other program can have: the reference, a third party's."""
    entry, options = registry.parse(label)
    if type(options).mesh is not BackendOptions.mesh:
        raise HarnessError(f"backend '{entry.name}' cannot be exported: its ranks share samples")
    if entry.strategy is None or entry.strategy.family == "single":
        raise HarnessError(f"backend '{entry.name}' cannot be exported: it is none of torch or DeepSpeed")
    if entry.strategy.facts.cuts_layers:
        raise HarnessError(
            f"backend '{entry.name}' cannot be exported: its stages are modules of the harness"
        )
    if entry.strategy.route not in ("native", "accelerate"):
        raise HarnessError(f"backend '{entry.name}' cannot be exported; export the native strategy instead")
    return entry.strategy


def deepspeed_values(
    label: str, job: Job, layout: BatchLayout, world_size: int, device: str, parameters: int, preset: Preset
) -> dict[str, Any]:
    """DeepSpeed's JSON: that of `zero_config`, which a run hands over. Raises HarnessError."""
    _, options = registry.parse(label)
    stage = strategy_of(label).zero_stage
    assert stage is not None
    assert isinstance(options, ZeroOptions)
    if gathers_blocks(options):
        raise HarnessError("option 'leaf_module' cannot be exported: DeepSpeed wants classes of the model")
    context = SetupContext(
        world=World.planned(world_size, world_size, device),
        precision=job.training.held_precision,
        gradient_clipping=job.training.gradient_clipping,
        micro_batch_size=layout.micro_batch_size,
        accumulation_steps=layout.accumulation_steps,
        preset=preset,
        compute_loss=_no_loss,
    )
    return zero_config(stage, options, context, parameters)


def _no_loss(*_: Any) -> Any:
    raise AssertionError("a configuration computes no loss")


def torch_values(label: str, job: Job, world_size: int, blocks: list[str], preset: Preset) -> dict[str, Any]:
    """Arguments of DDP, FSDP1 or FSDP2, as far as they are not torch's own defaults."""
    _, options = registry.parse(label)
    strategy, low = strategy_of(label), LOW_DTYPES.get(job.training.precision)
    if strategy.family == "ddp":
        return {"arguments": {c.setting: c.value for c in ddp_changes(preset)}, "autocast": low}
    reduces_in_fp32 = bool(reduce_dtype_changes(job.training.held_precision, preset))
    values: dict[str, Any] = {
        "blocks": blocks if getattr(options, "auto_wrap", None) is None else [],
        "param_dtype": low,
        "reduce_dtype": "float32" if reduces_in_fp32 else None,
        "offload": getattr(options, "offload", "none") == "cpu",
        "shard_size": _shard_size(options, strategy, world_size),
    }
    if strategy.family == "fsdp1":
        names = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
        prefetch = {name: getattr(options, name, None) for name in names}
        return {**values, **prefetch, "sharding_strategy": FSDP1_STRATEGIES[strategy.sharding]}
    for name in ("prefetch", "master_dtype"):
        if getattr(options, name, None) not in (None, "fp32"):
            raise HarnessError(f"option '{name}' of '{label}' cannot be exported; leave it out")
    reshards = getattr(options, "reshard", None) or strategy.facts.reshards
    changes = fsdp2_changes(job.training.held_precision, preset, reshard=reshards)
    root = next((c.value for c in changes if c.setting == ROOT_RESHARD), None)
    return {**values, "reshard": reshards, "root_reshard": root}


def _shard_size(options: Any, strategy: StrategyKind, world_size: int) -> int | None:
    """Ranks of a shard group; None: one group."""
    if not strategy.facts.has_replicas:
        return None
    world = World.planned(world_size, world_size, "cpu")
    return shard_size(world, getattr(options, "shard_size", None))
