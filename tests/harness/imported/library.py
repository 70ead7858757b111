"""Prints what an installed library makes of every key of its files, as JSON: `python -m ... accelerate`.

Of a key with another value than its default: 'changes' what the library would run with, 'nothing', or
'refuses', by stage of ZeRO or version of FSDP. A process of its own: Accelerate reads the environment.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

from harness.imported.read_defaults import BETWEEN, FSDP_VERSIONS, STAGES, _launched, _plugin

FSDP_VALUES: dict[str, list[Any]] = {
    "fsdp_sharding_strategy": ["SHARD_GRAD_OP"], "fsdp_reshard_after_forward": [False, "SHARD_GRAD_OP"],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP"], "fsdp_backward_prefetch": ["BACKWARD_POST"],
    "fsdp_state_dict_type": ["LOCAL_STATE_DICT"], "fsdp_ignored_modules": ["head"],
    "fsdp_transformer_layer_cls_to_wrap": ["Block"], "fsdp_min_num_params": [100],
}  # fmt: skip
LOADING = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}
"""Else Accelerate's plugin stops on a machine without a GPU."""


def verdict(before: Any, make: Callable[[], Any]) -> str:
    try:
        return "nothing" if make() == before else "changes"
    except Exception:
        return "refuses"


def shown(values: Any) -> str:
    return re.sub(r" at 0x\w+", "", str(values))


def fsdp(version: int, more: dict[str, Any]) -> str:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    document = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version, **LOADING, **more}}
    return shown(_plugin(FullyShardedDataParallelPlugin, prepare_multi_gpu_env(_launched(document))))


def of_accelerate() -> dict[str, Any]:
    from accelerate.commands.launch import launch_command_parser

    options = {action.dest for action in launch_command_parser()._actions}
    # Read by the launcher, though no option.
    names = sorted({name for name in options if name.startswith("fsdp_")} | {"fsdp_ignored_modules"})
    answer: dict[str, Any] = {}
    for version in FSDP_VERSIONS:
        before = fsdp(version, {})
        answer[str(version)] = {
            name: [
                [value, verdict(before, partial(fsdp, version, {name: value}))]
                for value in FSDP_VALUES.get(name, [True, False])
            ]
            for name in names
            if name != "fsdp_version"
        }
    return answer


def other(field: Any) -> Any:
    """Another value of a field of DeepSpeed's models."""
    default = field.get_default(call_default_factory=True)
    if default is None:
        return True
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return 7 if default != 7 else 8
    return None


def of_deepspeed() -> dict[str, Any]:
    from deepspeed.runtime import config, engine
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401 - derives from what is replaced
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def read(document: dict[str, Any]) -> str:
        values = vars(config.DeepSpeedConfig({"train_batch_size": 1} | document))
        return shown({name: value for name, value in values.items() if name != "_param_dict"})

    def made(stage: int, zero: dict[str, Any]) -> str:
        """Arguments of the optimizer of a stage, as the engine gives them."""
        document = {"train_batch_size": 1, "zero_optimization": {"stage": stage, **zero}}
        own = MagicMock()
        own._config = config.DeepSpeedConfig(document)
        for name, function in vars(engine.DeepSpeedEngine).items():
            if name.startswith(("zero_", "gradient_", "postscale", "bf16_", "fp16_", "bfloat16", "get_data",
                                "clip", "save_muon", "cpuadam")):  # fmt: skip
                setattr(own, name, function.__get__(own) if callable(function) else function)
        own.communication_data_type = engine.DeepSpeedEngine.communication_data_type.fget(own)
        for name in ("autotp_size", "super_offload", "wall_clock_breakdown", "zenflow"):
            setattr(own, name, MagicMock(return_value=0))
        own.zenflow, own.has_moe_layers = False, False
        found: dict[str, Any] = {}

        def record(*_: Any, **given: Any) -> None:
            found.update(given)

        with (
            patch.object(engine, "DeepSpeedZeroOptimizer", record),
            patch.object(stage3, "DeepSpeedZeroOptimizer_Stage3", record),
        ):
            engine.DeepSpeedEngine._configure_zero_optimizer(own, MagicMock())
        assert found
        return shown({n: v for n, v in found.items() if not isinstance(v, MagicMock) and n != "ds_config"})

    fields = {}
    for section, model in (("zero_optimization", DeepSpeedZeroConfig), ("bf16", DeepSpeedBF16Config),
                           ("fp16", DeepSpeedFP16Config)):  # fmt: skip
        for name, field in model.model_fields.items():
            if name not in ("stage", "enabled") and (value := other(field)) is not None:
                for spelled in filter(None, (name, field.alias)):
                    fields[f"{section}.{spelled}"] = value
    answer: dict[str, Any] = {}
    for stage in STAGES:
        base = {"zero_optimization": {"stage": stage}}
        before, arguments = read(base), made(stage, {}) if stage else ""
        of_stage = answer[str(stage)] = {}
        for key, value in fields.items():
            section, name = key.split(".")
            document = base | {section: {**base.get(section, {}), name: value}}
            parsed = verdict(before, partial(read, document))
            passed = None
            if stage and section == "zero_optimization" and parsed == "changes":
                passed = verdict(arguments, partial(made, stage, {name: value}))
            of_stage[key] = [value, parsed, passed]
        for key in getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}):
            of_stage[key] = [False, verdict(before, partial(read, base | {key: False})), None]
    return answer


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = of_accelerate() if sys.argv[1] == "accelerate" else of_deepspeed()
    sys.stdout.write(f"{BETWEEN}\n{json.dumps(found)}\n")
