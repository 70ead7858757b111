"""What each preset changes of each library's defaults: the one place that says so, and that backends obey.

Importable without torch.
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from harness.backends.base import Precision, Preset
from harness.backends.strategy import StrategyKind

# 25 MiB of fp32, the bucket of DDP, so that buffers do not decide a comparison of memory.
BUCKET_ELEMENTS = 25 * 2**20 // 4
ZERO_BUCKET_DEFAULT = 500_000_000
"""DeepSpeed 0.19, `runtime/zero/config.py`: `reduce_bucket_size`, `allgather_bucket_size`."""
ZERO3_DEFAULTS = {
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""The same file: up to these numbers of elements parameters stay gathered."""
ZERO3_PREFETCH_ELEMENTS = 50_000_000
"""The same file: `stage3_prefetch_bucket_size`, gathered ahead as each module is fetched."""
ZERO_LIMITS = {
    **ZERO3_DEFAULTS,
    "stage3_prefetch_bucket_size": ZERO3_PREFETCH_ELEMENTS,
    "reduce_bucket_size": ZERO_BUCKET_DEFAULT,
}
COMMUNICATION_DTYPE = "communication_data_type"
MULTI_RANK_BUCKET = "use_multi_rank_bucket_allreduce"
DATA_TYPES = "data_types"
TIMERS = "timers"
TIMER_WAITS = "throughput_timer_waits"
"""In `Effective.details` of DeepSpeed's engines: whether it waits for the device in each micro-step."""
HOOKED_WITHOUT_GATHER = "hooked_without_gather"
"""Likewise: stage 3 attached its gradient hooks without gathering the parameters."""
BESIDE_ZERO_OPTIMIZATION = (COMMUNICATION_DTYPE, DATA_TYPES, TIMERS)
"""Settings of DeepSpeed outside of its section `zero_optimization`."""
ROOT_RESHARD = "reshard_after_forward of the root"
ACCELERATOR_PRECISION = "mixed_precision of the Accelerator"


@dataclass(frozen=True, kw_only=True)
class PresetChange:
    """One setting that a preset gives another value than the library would."""

    setting: str
    value: Any
    default: Any
    reason: str


_ROWS = tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


def _changes(of: str, preset: Preset, precision: Precision = "fp32", stage: int = 0) -> list[PresetChange]:
    """Changes in `presets.toml` whose conditions hold; none unless the preset is 'like-for-like'."""
    return [
        PresetChange(**{key: deepcopy(row[key]) for key in ("setting", "value", "default", "reason")})
        for row in _ROWS[of]
        if preset == "like-for-like"
        and precision.endswith(row.get("precision", ""))
        and stage in row.get("stages", (stage,))
    ]


BF16_OPTIMIZER = "stage 1 then takes DeepSpeed's BF16_Optimizer, which no row has: its norm was seen half off"


def takes_bf16_optimizer(stage: int, precision: str, accumulated: str, offload: str) -> bool:
    """DeepSpeed 0.19.8, `runtime/engine.py`, `_do_optimizer_sanity_check`."""
    is_bf16 = precision in ("bf16", "bf16-mixed")
    return is_bf16 and (stage, accumulated, offload) == (1, "fp32", "none")


def ddp_changes(preset: Preset) -> list[PresetChange]:
    """Arguments of DistributedDataParallel."""
    return _changes("ddp", preset)


def trainer_ddp_changes(preset: Preset) -> list[PresetChange]:
    """Arguments of Trainer that concern DDP; it has none for `gradient_as_bucket_view`."""
    return _changes("trainer-ddp", preset)


def zero_changes(
    stage: int, precision: Precision, preset: Preset, parameter_count: int
) -> list[PresetChange]:
    """Settings of DeepSpeed's `zero_optimization`, and those beside it."""
    # Stage 3 allocates the whole bucket at once, however small the model.
    # DeepSpeed 0.19 refuses an odd one: it aligns buckets to two elements.
    bucket = min(BUCKET_ELEMENTS, parameter_count + parameter_count % 2)
    return [
        replace(change, value=bucket) if change.setting.endswith("_bucket_size") else change
        for change in _changes("zero", preset, precision, stage)
    ]


def fsdp2_changes(precision: Precision, preset: Preset, *, reshard: bool | int) -> list[PresetChange]:
    """Arguments of `fully_shard`: the root's `reshard_after_forward`, and `reduce_dtype`."""
    if preset != "like-for-like":
        return []
    root = PresetChange(
        setting=ROOT_RESHARD,
        value=reshard,
        default=None,
        reason="the root is resharded like the blocks; torch would keep it gathered for the backward pass"
        if reshard
        else "the root stays gathered like the blocks, which is also what torch's None does",
    )
    return [root, *reduce_dtype_changes(precision, preset)]


def reduce_dtype_changes(precision: Precision, preset: Preset) -> list[PresetChange]:
    """The mixed precision policy of FSDP1 and FSDP2."""
    return _changes("fsdp", preset, precision)


def accelerate_fsdp_changes(precision: Precision, preset: Preset) -> list[PresetChange]:
    """Accelerate's FSDP plugin at a mixed precision: the same policy, and no autocast above it."""
    return reduce_dtype_changes(precision, preset) + _changes("accelerate-fsdp", preset, precision)


def preset_changes(
    strategy: StrategyKind, precision: Precision, preset: Preset, parameter_count: int
) -> list[PresetChange]:
    """Everything that a preset changes for a built-in backend of this strategy."""
    if strategy.zero_stage is not None:
        return zero_changes(strategy.zero_stage, precision, preset, parameter_count)
    family = strategy.of_family
    if family.has_buckets:
        return ddp_changes(preset) if strategy.of_route.sets_bucket_view else trainer_ddp_changes(preset)
    if not strategy.sets_reduce_dtype:
        return []
    if strategy.through_accelerate:
        return accelerate_fsdp_changes(precision, preset)
    if family.has_root_reshard:
        return fsdp2_changes(precision, preset, reshard=strategy.facts.reshards)
    return reduce_dtype_changes(precision, preset)
