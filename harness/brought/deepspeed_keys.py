"""Keys of DeepSpeed's JSON and their meaning here (DeepSpeed 0.19, `runtime/config.py`, `zero/config.py`)."""

from __future__ import annotations

import math
import sys
from typing import Any

from harness.backends.presets import COMMUNICATION_DTYPE, DATA_TYPES
from harness.brought.reading import (
    Chooses,
    Fixed,
    NotUsed,
    Off,
    OfPreset,
    OfSchedule,
    Rule,
    ToJob,
    ToOption,
    boolean,
    each,
    integer,
    number,
)

PRECISION_KEYS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
"""Decide together; `deepspeed.precision` reads them."""
PURE_BF16_KEYS = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
SAVING = NotUsed(reason="concerns saving; the harness saves checkpoints in its own way")
LOGGING = NotUsed(reason="prints or logs only")
NVME = NotUsed(reason="a setting of offload to files that the harness leaves to DeepSpeed")
MEASURES = "it measures, which would slow this row only; the harness counts from outside"
CLIENT = "every strategy runs the job's optimizer with its constants"
MISREAD = (
    "under it DeepSpeed 0.19 attributes fp32 masters to other parameters (safe_get_full_fp32_param), so that "
    "weights could not be checked"
)
MOST_POWER = sys.float_info.max_exp
DEFAULT = "DeepSpeed's default, which no run changes"
LOOP = "the loop sets the learning rate of every backend"


COMPUTE_DTYPE = "the compute dtype"
"""What DeepSpeed takes where these keys are absent."""


def clipping(value: Any) -> float | None:
    """DeepSpeed writes 0 for no clipping."""
    return number(value) or None


def power_of_two(value: Any) -> float:
    power = integer(value)
    if power >= MOST_POWER:
        raise ValueError(f"2^{power} is not a number; at most 2^{MOST_POWER - 1}")
    return math.ldexp(1.0, power)


def folder(value: Any) -> str:
    """Raises ValueError for what is no path."""
    if not isinstance(value, str) or not value:
        raise ValueError("give the path of a folder")
    return value


def some_leaves(value: Any) -> str | None:
    """Raises ValueError for what is no list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a list of names")
    return "blocks" if value else None


def _first(value: Any) -> float:
    return _pair(value)[0]


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("give two numbers")
    return number(value[0]), number(value[1])


LEAVES = ToOption(
    option="leaf_module", default=None, convert=some_leaves,
    reason="the harness finds the blocks itself and makes each of them a leaf",
)  # fmt: skip

JOB: dict[str, Rule] = {
    "train_batch_size": ToJob(setting="training.global_batch_size", convert=integer),
    "train_micro_batch_size_per_gpu": ToJob(setting="training.micro_batch_size", convert=integer),
    "gradient_accumulation_steps": ToJob(setting="training.accumulation_steps", convert=integer),
    "gradient_clipping": ToJob(setting="training.gradient_clipping", convert=clipping),
    **{key: ToJob(setting="training.precision") for key in PRECISION_KEYS},
    "bf16.bf16_master_weights_and_grads": ToJob(setting="training.precision"),
    "bf16.bf16_optimizer_states": ToJob(setting="training.precision"),
    "fp16.initial_scale_power": ToJob(setting="training.initial_loss_scale", convert=power_of_two),
    "fp16.loss_scale_window": ToJob(setting="training.loss_scale_growth_interval", convert=integer),
    "optimizer.type": ToJob(setting="optimizer.kind"),
    "optimizer.params.adam_w_mode": ToJob(setting="optimizer.kind", reason="DeepSpeed's AdamW ignores it"),
    "optimizer.params.lr": ToJob(setting="optimizer.learning_rate", convert=number),
    "optimizer.params.betas": ToJob(setting="optimizer.beta1", convert=_first),
    "optimizer.params.eps": ToJob(setting="optimizer.epsilon", convert=number),
    "optimizer.params.momentum": ToJob(setting="optimizer.momentum", convert=number),
    "optimizer.params.weight_decay": ToJob(setting="optimizer.weight_decay", convert=number),
    "scheduler.type": ToJob(setting="schedule.scheduler", reason=LOOP),
}  # fmt: skip

BESIDE_ZERO: dict[str, Rule] = {
    "fp16.loss_scale": Fixed(used=0, reason="the loss scale is dynamic (0) under every backend"),
    "fp16.hysteresis": Fixed(used=1, reason="every backend's scale falls at the first overflow"),
    "fp16.min_loss_scale": Fixed(used=1, reason="no run lets its loss scale fall below"),
    "fp16.consecutive_hysteresis": Fixed(used=False, reason="hysteresis is 1"),
    "fp16.auto_cast": Fixed(used=False, reason="inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": Fixed(used=False, reason="masters are fp32", refuses=True),
    "bf16.immediate_grad_update": Fixed(reason=DEFAULT),
    "bf16.check_grad_overflow": Fixed(reason=DEFAULT),
    "bf16.check_overflow": NotUsed(reason="of earlier versions of DeepSpeed"),
    "optimizer.params.torch_adam": Fixed(used=True, reason=CLIENT),
    "optimizer.params.bias_correction": Fixed(used=True, reason=CLIENT, refuses=True),
    **{f"optimizer.params.{key}": Fixed(used=False, reason=CLIENT, refuses=True)
       for key in ("amsgrad", "nesterov", "maximize")},
    "optimizer.params.dampening": Fixed(used=0, reason=CLIENT, refuses=True),
    "optimizer.params.fused": NotUsed(reason="optimizer.implementation of the job decides it"),
    "optimizer.legacy_fusion": Fixed(used=False, reason=CLIENT),
    "scheduler.params.last_batch_iteration": NotUsed(reason=LOOP),
    "zero_allow_untested_optimizer": NotUsed(reason="DeepSpeed accepts torch's AdamW anyway"),
    "zero_force_ds_cpu_optimizer": Fixed(used=False, reason=CLIENT),
    "communication_data_type": OfPreset(setting=COMMUNICATION_DTYPE, default=COMPUTE_DTYPE),
    "data_types.grad_accum_dtype": OfPreset(setting=DATA_TYPES, default=COMPUTE_DTYPE),
    "data_types.keep_in_fp32_modules": Off(feature="modules that stay in fp32"),
    **{f"data_types.{key}": Off(feature="a dtype of its own for weights or buffers")
       for key in ("param_dtype", "buffer_dtype")},
    "managed_gradient_accumulation": Fixed(reason=DEFAULT, refuses=True),
    "use_data_before_expert_parallelism": Fixed(used=False, reason="no layer has experts", refuses=True),
    "vocabulary_size": LOGGING,
    "prescale_gradients": Fixed(used=False, reason="gradients are averaged after they are summed"),
    "gradient_predivide_factor": Fixed(used=1.0, reason="prescale_gradients is off"),
    "gradient_allreduce_op": Fixed(used="mean", reason="gradients are averaged", refuses=True),
    "sparse_gradients": Fixed(used=False, reason="gradients are dense", refuses=True),
    "disable_allgather": Fixed(reason=DEFAULT),
    "sequence_parallel_size": Chooses(),
    "seq_parallel_communication_data_type": Fixed(reason=DEFAULT),
    "tensor_parallel.autotp_size": Chooses(),
    "compile.enabled": ToJob(setting="model.compile"),
    "compile.disable": ToJob(setting="model.compile"),
    "compile.backend": Fixed(used="inductor", reason="model.compile has torch's own backend", refuses=True),
    "compile.deepcompile": Off(feature="DeepCompile"),
    "zero_optimization": Chooses(),
    "wall_clock_breakdown": Fixed(used=False, reason=MEASURES),
    "memory_breakdown": Fixed(used=False, reason=MEASURES),
    "comms_logger.enabled": Fixed(used=False, reason=MEASURES),
    "flops_profiler.enabled": Fixed(used=False, reason=MEASURES),
    "autotuning.enabled": Fixed(used=False, reason="a row has one configuration"),
    "timers.throughput.enabled": OfPreset(setting="timers", default=True, convert=boolean),
    "steps_per_print": LOGGING,
    "dump_state": LOGGING,
    "log_level": LOGGING,
    "dataloader_drop_last": NotUsed(reason="the harness has its own data loading"),
    "disable_python_gc": NotUsed(reason="the harness collects garbage between windows"),
}  # fmt: skip

ZERO: dict[str, Rule] = {
    "stage": Chooses(),
    "offload_optimizer.device": Chooses(),
    "offload_param.device": Chooses(),
    "cpu_offload": Chooses(),
    "cpu_offload_param": Chooses(),
    "cpu_offload_params": Chooses(),
    "cpu_offload_use_pin_memory": Fixed(used=True, reason="host memory is pinned where there is a GPU"),
    "offload_optimizer.pin_memory": Fixed(used=True, reason="host memory is pinned where there is a GPU"),
    "offload_param.pin_memory": Fixed(used=True, reason="host memory is pinned where there is a GPU"),
    "offload_optimizer.ratio": Fixed(used=1.0, reason="offload is complete", refuses=True),
    "offload_optimizer.super_offload": Off(feature="SuperOffload"),
    "offload_optimizer.cpuadam_cores_perc": NotUsed(reason="super_offload is off"),
    "offload_optimizer.nvme_path": ToOption(option="nvme_path", default=None, convert=folder),
    "offload_param.nvme_path": ToOption(option="nvme_path", default=None, convert=folder),
    "offload_param.buffer_count": ToOption(option="buffer_count", default=None, convert=integer),
    "offload_param.buffer_size": ToOption(option="buffer_size", default=None, convert=integer),
    **each("offload_optimizer.buffer_count offload_optimizer.buffer_size", NVME),
    **each("offload_optimizer.pipeline_read offload_optimizer.pipeline_write", NVME),
    "offload_optimizer.fast_init": NVME,
    "offload_param.max_in_cpu": Fixed(used=0, reason="offload of weights to files is complete"),
    "overlap_comm": ToOption(option="overlap_comm", convert=boolean),
    "round_robin_gradients": Fixed(used=False, reason=MISREAD),
    "contiguous_gradients": ToOption(option="contiguous_gradients", convert=boolean),
    "use_multi_rank_bucket_allreduce": ToOption(option="use_multi_rank_bucket_allreduce", convert=boolean),
    "memory_efficient_linear": ToOption(option="memory_efficient_linear", convert=boolean),
    **{name: ToOption(option=name, convert=integer) for name in (
        "reduce_bucket_size", "allgather_bucket_size", "stage3_param_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
        "sub_group_size")},
    **each(
        "reduce_scatter allgather_partitions stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential parameter_alignment ignore_unused_parameters override_module_apply "
        "save_muon_momentum_buffer_in_memory", Fixed(reason=DEFAULT)),
    "stage3_gather_16bit_weights_on_model_save": SAVING,
    "stage3_gather_fp16_weights_on_model_save": SAVING,
    "elastic_checkpoint": SAVING,
    "load_from_fp32_weights": SAVING,
    "pipeline_loading_checkpoint": SAVING,
    "compute_grad_norm": Fixed(used=True, reason="the norm is compared"),
    "legacy_stage1": Fixed(used=False, reason="removed from DeepSpeed", refuses=True),
    "log_trace_cache_warnings": LOGGING,
    "enable_sanity_checks": LOGGING,
    "zero_hpz_partition_size": ToOption(option="hpz", convert=integer),
    "zero_quantized_weights": Off(feature="qwZ"),
    "zero_quantized_nontrainable_weights": Off(feature="qwZ"),
    "zero_quantized_gradients": Off(feature="qgZ"),
    "mics_shard_size": Off(feature="MiCS"),
    "mics_hierarchical_params_gather": Off(feature="MiCS"),
    **{f"leaf_module.{name}": LEAVES for name in ("classes", "names", "name_suffixes")},
}  # fmt: skip

SHORT_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
    "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
)  # fmt: skip
"""DeepSpeed reads these also without their prefix 'stage3_'."""

SECTIONS: dict[str, Rule] = {
    **each("tensorboard wandb comet csv_monitor monitor_config", LOGGING),
    **each("comms_logger flops_profiler autotuning", LOGGING),
    "aio": NVME,
    "checkpoint": SAVING,
    "nebula": SAVING,
    "activation_checkpointing": NotUsed(
        reason="of models that call deepspeed.checkpointing; the job has training.activation_checkpointing"),
    **{name: Off(feature=feature) for name, feature in {
        "amp": "NVIDIA Apex", "torch_autocast": "autocast inside DeepSpeed",
        "elasticity": "elastic training", "hybrid_engine": "the hybrid engine",
        "sparse_attention": "sparse attention", "compression_training": "compression",
        "data_efficiency": "data efficiency", "curriculum_learning": "curriculum learning",
        "progressive_layer_drop": "progressive layer drop", "quantize_training": "quantised training",
        "weight_quantization": "quantised weights", "eigenvalue": "eigenvalues", "pipeline": "pipelining",
        "expert_parallel": "expert parallelism",
    }.items()},
    "zero_optimization.zenflow": Off(feature="ZenFlow"),
    "compile": NotUsed(reason="of DeepCompile, which is off"),
    "tensor_parallel": Off(feature="further settings of AutoTP"),
    "scheduler.params": OfSchedule(),
}  # fmt: skip
"""Sections whose keys share one rule, unless a key has its own."""

KEYS: dict[str, Rule] = {
    **JOB, **BESIDE_ZERO,
    **{f"zero_optimization.{key}": rule for key, rule in ZERO.items()},
    **{f"zero_optimization.{key}": ZERO[f"stage3_{key}"] for key in SHORT_NAMES},
}  # fmt: skip
"""Every key, dotted."""
