"""The DeepSpeed configuration of a job: every default that changes the mathematics is pinned here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from harness.backends import presets
from harness.backends.base import SetupContext, Unsupported
from harness.backends.options import Zero3Options, Zero12Options, ZeroOptions

GIVEN_AS_THEY_ARE = (
    "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "memory_efficient_linear",
    "sub_group_size",
)  # fmt: skip
"""Options that have DeepSpeed's own name and value."""


def zero_config(
    stage: int,
    options: ZeroOptions,
    context: SetupContext,
    parameter_count: int,
    block_classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON configuration for `deepspeed.initialize`, the optimizer being the client's.

    `block_classes`: full names of the classes of the model's blocks. Raises Unsupported for a precision that
    the stage does not have, and for prefetch that could not take place.
    """
    clipping = context.gradient_clipping or 0.0
    if options.gradient_clipping is not None:
        clipping = options.gradient_clipping
    changes = presets.zero_changes(stage, context.precision, context.preset, parameter_count)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": context.micro_batch_size,
        "gradient_accumulation_steps": context.accumulation_steps,
        # DeepSpeed 0.19.3 and later clip at 1.0 when this key is missing.
        "gradient_clipping": clipping,
        "prescale_gradients": False,
        "steps_per_print": 10**9,
        "zero_optimization": _zero_optimization(stage, options, context, changes, block_classes),
    } | {c.setting: c.value for c in changes if c.setting in presets.BESIDE_ZERO_OPTIMIZATION}
    if options.communication_data_type is not None:
        config[presets.COMMUNICATION_DTYPE] = options.communication_data_type
    if (accumulated := options.grad_accum_dtype) is not None:
        compute = context.precision.removesuffix("-mixed")
        if stage == 0 and accumulated != compute:
            raise Unsupported(f"DeepSpeed's stage 0 adds gradients up in {compute} only; use stage 2 or 3")
        if presets.takes_bf16_optimizer(stage, context.precision, accumulated, options.offload):
            raise Unsupported(f"grad_accum_dtype={accumulated}: {presets.BF16_OPTIMIZER}")
        config[presets.DATA_TYPES] = {"grad_accum_dtype": accumulated}
    if options.default_clipping:
        del config["gradient_clipping"]
    config |= _precision(stage, options, context)
    if context.optimizer != "adamw":
        # DeepSpeed takes optimizers that it does not know only when asked; the harness judges the result.
        config["zero_allow_untested_optimizer"] = True
    if options.offload != "none":
        # DeepSpeed insists on its own CPUAdam unless told otherwise.
        config["zero_force_ds_cpu_optimizer"] = options.adam == "deepspeed"
    return config


def _zero_optimization(
    stage: int,
    options: ZeroOptions,
    context: SetupContext,
    changes: Sequence[presets.PresetChange],
    block_classes: Sequence[str],
) -> dict[str, Any]:
    settings: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return settings
    settings |= {c.setting: c.value for c in changes if c.setting not in presets.BESIDE_ZERO_OPTIMIZATION}
    for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients"):
        if (value := getattr(options, name)) is not None:
            settings[name] = value
    pinned = context.world.device == "cuda"
    if options.offload != "none":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if options.offload == "cpu" and stage == 3:
        settings["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    if isinstance(options, Zero12Options) and options.use_multi_rank_bucket_allreduce is not None:
        settings[presets.MULTI_RANK_BUCKET] = options.use_multi_rank_bucket_allreduce
    if isinstance(options, Zero3Options):
        settings |= {
            name: value for name in GIVEN_AS_THEY_ARE if (value := getattr(options, name)) is not None
        }
        if options.stage3_prefetch_bucket_size and settings.get("stage3_max_live_parameters") == 0:
            raise Unsupported(
                "stage3_prefetch_bucket_size has no effect while stage3_max_live_parameters is 0; "
                "set that too"
            )
        if options.hpz is not None:
            settings["zero_hpz_partition_size"] = options.hpz
        if options.leaf_module == "blocks":
            settings["leaf_module"] = {"classes": list(block_classes), "names": [], "name_suffixes": []}
    return settings


def _precision(stage: int, options: ZeroOptions, context: SetupContext) -> dict[str, Any]:
    match context.precision:
        case "bf16-mixed":
            return {"bf16": {"enabled": True}}
        case "fp16-mixed":
            scale = context.loss_scale
            return {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": round(math.log2(scale.initial)),
                    "loss_scale_window": scale.growth_interval,
                    "hysteresis": 1,
                    "min_loss_scale": 1,
                }
            }
        case "bf16":
            library = f"DeepSpeed {version('deepspeed')}"
            if stage == 0:
                raise Unsupported(
                    f"{library} always keeps fp32 master weights at stage 0; "
                    "bf16 masters and states exist at stages 1 to 3"
                )
            if options.offload != "none" and options.adam is None:
                raise Unsupported(
                    f"{library} offloads an optimizer without fp32 masters only if it is its own "
                    "DeepSpeedCPUAdam, not the job's AdamW; add adam=deepspeed or use "
                    "training.precision=bf16-mixed"
                )
            return {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                }
            }
        case _:
            return {}
