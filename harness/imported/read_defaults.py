"""Prints the defaults of DeepSpeed or Accelerate as JSON, from the library's own objects.

A process of its own runs it (`library_defaults`): only here may the libraries be imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

STAGES = range(4)
FSDP_VERSIONS = (1, 2)
FROM_PROGRAMS = (
    "LRScheduler",
    "ReduceLROnPlateau",
    "ChainedScheduler",
    "SequentialLR",
    "LambdaLR",
    "MultiplicativeLR",
)
"""Schedulers that no file can give what they need."""
BETWEEN = "--- defaults ---"
"""Before the answer: importing the libraries prints too."""


def deepspeed_defaults() -> dict[str, Any]:
    """Keys of DeepSpeed's JSON and their defaults; sections by stage, optimizers and schedulers by name."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import config, constants, lr_schedules
    from deepspeed.runtime.config import ADAM_W_MODE_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from torch.optim import lr_scheduler

    top = {
        name.removesuffix("_DEFAULT").lower(): value
        for name, value in vars(constants).items()
        if name.endswith("_DEFAULT")
    }
    # Of torch's, DeepSpeed builds by name those that need no loss and no function.
    schedulers = {
        name: made
        for name, made in vars(lr_scheduler).items()
        if inspect.isclass(made) and issubclass(made, lr_scheduler.LRScheduler) and not name.startswith("_")
        and name not in FROM_PROGRAMS
    }  # fmt: skip
    schedulers |= {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    sections = {}
    for stage in STAGES:  # under each name that a file may use
        values = DeepSpeedZeroConfig(stage=stage).model_dump(mode="json")
        fields = DeepSpeedZeroConfig.model_fields.items()
        sections[str(stage)] = values | {f.alias: values[name] for name, f in fields if f.alias}
    optimizers = {
        "torch": torch.optim.AdamW, "cpu": DeepSpeedCPUAdam, "fused": FusedAdam, "sgd": torch.optim.SGD
    }  # fmt: skip
    return {
        "top": top | {"adam_w_mode": ADAM_W_MODE_DEFAULT},
        "fp16": DeepSpeedFP16Config().model_dump(mode="json"),
        "bf16": DeepSpeedBF16Config().model_dump(mode="json"),
        "zero": sections,
        "optimizers": {name: _parameters(made) for name, made in optimizers.items()},
        "schedulers": {name: _parameters(made) for name, made in schedulers.items()},
        "removed": {
            f"{section}{key}": why.partition(". ")[0]
            for section, name in (("", "TOP_LEVEL"), ("zero_optimization.", "ZERO"))
            for key, why in getattr(config, f"_REMOVED_{name}_CONFIG_KEYS", {}).items()
        },
    }


def accelerate_defaults() -> dict[str, Any]:
    """What `accelerate launch` makes of a file that gives nothing, as the plugins read it."""
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    found: dict[str, Any] = {}
    for version in FSDP_VERSIONS:
        # Else the plugin stops on a machine without a GPU. How weights are loaded is the harness's own.
        loading = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}
        section = {"fsdp_version": version, **loading}
        arguments = _launched({"distributed_type": "FSDP", "fsdp_config": section})
        found[f"fsdp{version}"] = _plugin(FullyShardedDataParallelPlugin, prepare_multi_gpu_env(arguments))
    arguments = _launched({"distributed_type": "DEEPSPEED", "deepspeed_config": {}})
    vars(arguments).setdefault("deepspeed_fields_from_accelerate_config", "")
    environment = prepare_deepspeed_cmd_env(arguments)[1]
    found["deepspeed"] = _plugin(DeepSpeedPlugin, environment)
    found["mixed_precision"] = environment["ACCELERATE_MIXED_PRECISION"]
    return found


def _launched(document: dict[str, Any]) -> Any:
    """The arguments of `accelerate launch` with a configuration file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    shared = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "num_machines": 1,
              "machine_rank": 0, "main_training_function": "main", "use_cpu": False}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accelerate.json"
        path.write_text(json.dumps(shared | document), encoding="utf-8")
        arguments = launch_command_parser().parse_args(["--config_file", str(path), "program.py"])
        return _validate_launch_command(arguments)[0]


def _plugin(made: Callable[[], Any], environment: dict[str, str]) -> dict[str, Any]:
    """The fields of a plugin in the environment that the launcher hands to ranks."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        plugin = made()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {field.name: getattr(plugin, field.name, None) for field in dataclasses.fields(plugin)}


def _parameters(made: Callable[..., Any]) -> dict[str, Any]:
    """Arguments after the first: required ones, and defaults of the others."""
    given = list(inspect.signature(made).parameters.values())[1:]
    given = [one for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return {
        "required": [one.name for one in given if one.default is one.empty],
        "defaults": {one.name: one.default for one in given if one.default is not one.empty},
    }


def _plain(value: Any) -> Any:
    """What JSON gets for objects it has not: a list for a set, an enumeration's name, else None."""
    if isinstance(value, Enum):
        return value.name
    return list(value) if isinstance(value, set | frozenset) else None


def main(kind: str) -> None:
    """Print the defaults of one library."""
    found = deepspeed_defaults() if kind == "deepspeed" else accelerate_defaults()
    sys.stdout.write(f"{BETWEEN}\n{json.dumps(found, default=_plain)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
