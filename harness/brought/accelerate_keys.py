"""Keys of an Accelerate configuration and their meaning here (Accelerate 1.15, `commands/config`)."""

from __future__ import annotations

from typing import Any

from harness.brought.deepspeed_keys import SAVING, clipping, folder
from harness.brought.reading import (
    Chooses,
    Fixed,
    NotUsed,
    Off,
    Rule,
    ToJob,
    ToOption,
    boolean,
    each,
    integer,
)

LAUNCHING = NotUsed(reason="concerns the launcher; the harness starts ranks itself: --nproc")
TPUS = NotUsed(reason="concerns TPUs")
LOADING = NotUsed(reason="runtime.loading decides how initial weights reach ranks")
WRAPPED = "every block of the model is one unit; the harness finds the blocks itself"
PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""`mixed_precision` and `training.precision`."""
PREFETCH = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none"}


def precision(value: Any) -> str:
    """Raises ValueError for fp8 and what is no precision."""
    name = "no" if value in (False, None) else str(value).lower()
    if name not in PRECISIONS:
        own = "; `training.precision: fp8` of the job is torchao's" if name == "fp8" else ""
        raise ValueError(f"Accelerate files of {', '.join(PRECISIONS)} are run{own}")
    return PRECISIONS[name]


def backward_prefetch(value: Any) -> str:
    name = "no_prefetch" if value in (None, False) else str(value).lower()
    if name not in PREFETCH:
        raise ValueError(f"give {', '.join(map(str.upper, PREFETCH))}")
    return PREFETCH[name]


def wrapping(value: Any) -> str | None:
    """'none': the whole model is one unit. Raises ValueError for a policy that no row has."""
    name = "NO_WRAP" if value is None else str(value).upper()
    if name not in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        raise ValueError("unsupported: a unit is a transformer block (TRANSFORMER_BASED_WRAP) or the whole "
                         "model (NO_WRAP)")  # fmt: skip
    return "none" if name == "NO_WRAP" else None


TOP: dict[str, Rule] = {
    "distributed_type": Chooses(),
    "mixed_precision": ToJob(setting="training.precision", convert=precision),
    "compute_environment": Fixed(
        used="LOCAL_MACHINE", reason="the harness runs where it is started", refuses=True),
    **each("debug enable_cpu_affinity gpu_ids machine_rank main_process_ip main_process_port", LAUNCHING),
    **each("main_training_function num_machines num_processes rdzv_backend same_network use_cpu", LAUNCHING),
    **each("command_file commands downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo", TPUS),
    **each("tpu_vm tpu_zone", TPUS),
}  # fmt: skip
RANKS = NotUsed(reason="the ranks that the other sizes leave: --nproc decides")
EAGER = "model.compile takes torch's defaults"
SECTIONS: dict[str, Rule] = {
    "fp8_config": Off(feature="fp8 of such libraries; `training.precision: fp8` of a job is torchao's"),
    "ipex_config": Off(feature="Intel's extension"),
    "megatron_lm_config": Off(feature="Megatron-LM"),
    "tp_config": Off(
        feature="the section of tensor parallelism of earlier versions: give parallelism_config"
    ),
    "mpirun_config": LAUNCHING,
}
PARALLEL: dict[str, Rule] = {
    **each("dp_replicate_size tp_size cp_size sp_size cp_comm_strategy", Chooses()),
    "dp_shard_size": RANKS,
    "cp_backend": Fixed(used="torch", reason="context parallelism is torch's", refuses=True),
    "sp_backend": Fixed(used="deepspeed", reason="sequence parallelism is DeepSpeed's", refuses=True),
    **each("sp_seq_length sp_seq_length_is_variable", NotUsed(reason="samples are as the job has them")),
    "sp_attn_implementation": NotUsed(reason="model.attention of the job decides it"),
}
"""Of `parallelism_config`, where each has the prefix 'parallelism_config_'."""
DYNAMO: dict[str, Rule] = {
    "dynamo_backend": ToJob(setting="model.compile"),
    "dynamo_use_regional_compilation": ToJob(setting="model.compile"),
    "dynamo_mode": Fixed(used="default", reason=EAGER, refuses=True),
    "dynamo_use_fullgraph": Fixed(used=False, reason=EAGER, refuses=True),
    "dynamo_use_dynamic": Fixed(used=False, reason=EAGER),
}
FSDP: dict[str, Rule] = {
    "fsdp_version": Chooses(),
    "fsdp_sharding_strategy": Chooses(),
    "fsdp_reshard_after_forward": Chooses(),
    "fsdp_offload_params": Chooses(),
    "fsdp_auto_wrap_policy": ToOption(option="auto_wrap", default=None, convert=wrapping, reason=WRAPPED),
    "fsdp_transformer_layer_cls_to_wrap": Fixed(used="the job's transformer blocks", reason=WRAPPED),
    "fsdp_min_num_params": NotUsed(reason="of SIZE_BASED_WRAP only"),
    "fsdp_backward_prefetch": ToOption(
        option="backward_prefetch", default="pre", convert=backward_prefetch),  # torch's default
    "fsdp_forward_prefetch": ToOption(option="forward_prefetch", default=False, convert=boolean),
    "fsdp_limit_all_gathers": ToOption(option="limit_all_gathers", default=True, convert=boolean),
    "fsdp_use_orig_params": Fixed(used=True, reason="groups of weight decay need the original parameters"),
    "fsdp_activation_checkpointing": ToJob(setting="training.activation_checkpointing", convert=boolean),
    "fsdp_activation_checkpointing_offload": Fixed(
        used=False, reason="activations stay on the device", refuses=True),
    "fsdp_ignored_modules": Off(feature="leaving modules out of FSDP"),
    "fsdp_cpu_ram_efficient_loading": LOADING,
    "fsdp_sync_module_states": LOADING,
    "fsdp_state_dict_type": SAVING,
}  # fmt: skip
DEEPSPEED: dict[str, Rule] = {
    "zero_stage": Chooses(),
    "offload_optimizer_device": Chooses(),
    "offload_param_device": Chooses(),
    "deepspeed_config_file": Chooses(),
    "gradient_accumulation_steps": ToJob(setting="training.accumulation_steps", convert=integer),
    "gradient_clipping": ToJob(setting="training.gradient_clipping", convert=clipping),
    "offload_optimizer_nvme_path": ToOption(option="nvme_path", default="none", convert=folder),
    "offload_param_nvme_path": ToOption(option="nvme_path", default="none", convert=folder),
    "zero3_init_flag": LOADING,
    "zero3_save_16bit_model": SAVING,
    "deepspeed_moe_layer_cls_names": Off(feature="mixture of experts under ZeRO-3"),
    **each("deepspeed_multinode_launcher deepspeed_hostfile", LAUNCHING),
    **each("deepspeed_inclusion_filter deepspeed_exclusion_filter", LAUNCHING),
}  # fmt: skip
IGNORED_WITH_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
"""Accelerate stops if one of these stands next to `deepspeed_config_file` (`DeepSpeedPlugin`)."""
KEYS: dict[str, Rule] = {
    **TOP,
    **{f"parallelism_config.parallelism_config_{key}": rule for key, rule in PARALLEL.items()},
    **{f"dynamo_config.{key}": rule for key, rule in DYNAMO.items()},
    "dynamo_backend": ToJob(setting="model.compile"),
    **{f"fsdp_config.{key}": rule for key, rule in FSDP.items()},
    **{f"deepspeed_config.{key}": rule for key, rule in DEEPSPEED.items()},
}
