"""Configuration files as people write them for Accelerate and DeepSpeed, in this project's own wording."""

from typing import Any

FSDP1: dict[str, dict[str, Any]] = {
    "full-shard": {
        "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True, "fsdp_sync_module_states": True,
    },
    "number": {"fsdp_sharding_strategy": 2, "fsdp_backward_prefetch": "BACKWARD_POST"},
    "by-reshard": {
        "fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_forward_prefetch": True,
    },
    "offload": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True},
    "hybrid": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2", "fsdp_activation_checkpointing": True},
    "no-shard": {
        "fsdp_sharding_strategy": "NO_SHARD", "fsdp_backward_prefetch": "NO_PREFETCH",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}  # fmt: skip
FSDP2: dict[str, dict[str, Any]] = {
    "plain": {},
    "reshard": {"fsdp_reshard_after_forward": True, "fsdp_cpu_ram_efficient_loading": True},
    "keep": {"fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": False},
    "offload": {"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    "checkpointing": {"fsdp_activation_checkpointing": True},
    "text": {"fsdp_reshard_after_forward": "true", "fsdp_offload_params": "no"},
}
PLUGIN: dict[str, dict[str, Any]] = {
    "stage-1": {"zero_stage": 1, "zero3_init_flag": False, "gradient_accumulation_steps": 1},
    "stage-2": {"zero_stage": 2, "offload_optimizer_device": "none", "gradient_clipping": 0.5},
    "stage-2-offload": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "stage-3": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True},
    "stage-3-offload": {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu",
        "deepspeed_multinode_launcher": "standard",
    },
    "default-stage": {"gradient_accumulation_steps": 2},
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "stage-1": {
        "zero_optimization": {"stage": 1, "allgather_bucket_size": 2e8, "overlap_comm": True},
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
        "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "wall_clock_breakdown": False,
    },
    "stage-1-offload": {
        "zero_optimization": {"stage": 1, "offload_optimizer": CPU}, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
    },
    "stage-2": {
        "zero_optimization": {
            "stage": 2, "contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True,
            "reduce_bucket_size": 5e8, "round_robin_gradients": True,
        },
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "min_loss_scale": 1},
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
    },
    "stage-2-offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "overlap_comm": False},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-5, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.02},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 3, "total_num_steps": 12},
        },
        "gradient_clipping": 0,
    },
    "stage-3": {
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e8, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True}, "steps_per_print": 2000,
    },
    "stage-3-offload": {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "max_live_parameters": 0,
            "memory_efficient_linear": False,
        },
        "tensorboard": {"enabled": False, "output_path": "logs"},
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    },
}  # fmt: skip


def accelerate(kind: str, section: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A complete Accelerate file: `kind` is fsdp1, fsdp2 or plugin."""
    shared = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "mixed_precision": "bf16"}
    if kind == "plugin":
        return {**shared, "distributed_type": "DEEPSPEED", "deepspeed_config": section, **top}
    version = {"fsdp_version": 2} if kind == "fsdp2" else {}
    wrap = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {**shared, "distributed_type": "FSDP", "fsdp_config": {**version, **wrap, **section}, **top}


def every_file() -> dict[str, tuple[str, dict[str, Any]]]:
    """(Which tool reads it, its content) by name."""
    kinds = {"fsdp1": FSDP1, "fsdp2": FSDP2, "plugin": PLUGIN}
    found = {
        f"{kind}-{name}": ("accelerate", accelerate(kind, section))
        for kind, sections in kinds.items()
        for name, section in sections.items()
    }
    return found | {f"deepspeed-{name}": ("deepspeed", document) for name, document in DEEPSPEED.items()}
