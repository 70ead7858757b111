"""The file that `accelerate launch --config_file` takes for a backend."""

from __future__ import annotations

from typing import Any

from harness.backends import registry
from harness.brought.accelerate import RESHARDS, STRATEGIES
from harness.brought.accelerate_keys import PRECISIONS, PREFETCH
from harness.errors import HarnessError
from harness.exported.strategies import strategy_of
from harness.job.job import Job

OF_BACKEND = {backend: name for name, backend in STRATEGIES.items()}
OF_PREFETCH = {value: name.upper() for name, value in PREFETCH.items()}
OF_PRECISION = {value: name for name, value in PRECISIONS.items() if name != "fp32"}


def accelerate_values(label: str, job: Job, world_size: int, device: str) -> dict[str, Any]:
    """Keys and values. DeepSpeed's own stand in `ds_config.json` next to it. Raises HarnessError."""
    strategy = strategy_of(label)
    shared: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": world_size,
        "machine_rank": 0,
        "main_training_function": "main",
    }
    if strategy.zero_stage is not None:
        plugin = {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": False}
        return {**shared, "distributed_type": "DEEPSPEED", "deepspeed_config": plugin}
    if job.training.precision not in OF_PRECISION:
        raise HarnessError(
            f"training.precision {job.training.precision} cannot be set in Accelerate without DeepSpeed; "
            "export torchrun instead"
        )
    shared["mixed_precision"] = OF_PRECISION[job.training.precision]
    if strategy.family == "ddp":
        # For MULTI_CPU `accelerate launch` 1.15 needs MPI; this one starts CPU ranks through torchrun.
        return {**shared, "distributed_type": "MULTI_GPU", "use_cpu": device == "cpu"}
    return {**shared, "distributed_type": "FSDP", "fsdp_config": _fsdp(label, job)}


def _fsdp(label: str, job: Job) -> dict[str, Any]:
    entry, options = registry.parse(label)
    version = 2 if strategy_of(label).family == "fsdp2" else 1
    native = entry.name.removeprefix("accelerate-")
    values: dict[str, Any] = {
        "fsdp_version": version,
        "fsdp_auto_wrap_policy": "NO_WRAP"
        if getattr(options, "auto_wrap", None)
        else "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": getattr(options, "offload", "none") == "cpu",
        "fsdp_activation_checkpointing": job.training.activation_checkpointing,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if version == 2:
        reshard = {backend: value for value, backend in RESHARDS.items()}.get(native)
        if reshard is None or getattr(options, "reshard", None) is not None:
            raise HarnessError(f"'{label}' cannot be set in Accelerate's file; export torchrun instead")
        return {**values, "fsdp_reshard_after_forward": reshard}
    prefetch = getattr(options, "backward_prefetch", None) or "pre"
    return {
        **values,
        "fsdp_sharding_strategy": OF_BACKEND[native],
        "fsdp_backward_prefetch": OF_PREFETCH[prefetch],
        "fsdp_forward_prefetch": bool(getattr(options, "forward_prefetch", None)),
        "fsdp_use_orig_params": True,
    }
