"""A folder with a configuration and a program that train what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from harness.backends.base import Preset
from harness.errors import HarnessError
from harness.exported.accelerate_file import accelerate_values
from harness.exported.strategies import LOW_DTYPES, deepspeed_values, strategy_of, torch_values
from harness.files import write_atomically
from harness.job.batch import BatchLayout
from harness.job.job import Job, axes_of
from harness.job.model import CODE_SWITCH

Tool = Literal["accelerate", "deepspeed", "torchrun"]
LAUNCH = {
    "accelerate": "accelerate launch --config_file accelerate.yaml train.py",
    "deepspeed": "deepspeed --num_gpus {ranks} train.py",
    "torchrun": "torchrun --nproc-per-node {ranks} train.py",
}
"""In the folder; `{ranks}` of one machine."""
ON_CPU = {**LAUNCH, "deepspeed": LAUNCH["torchrun"]}
"""The launcher of DeepSpeed counts accelerators."""


def require_exportable(tool: Tool, label: str, job: Job) -> None:
    """Raise HarnessError for what the tool does not run, or what the example cannot say."""
    strategy = strategy_of(label)
    if strategy.zero_stage is not None and tool == "torchrun":
        raise HarnessError(f"backend '{label}' is DeepSpeed: use `harness export deepspeed` or accelerate")
    if strategy.zero_stage is None and tool == "deepspeed":
        raise HarnessError(f"backend '{label}' is torch's: use `harness export torchrun` or accelerate")
    if job.task != "causal-lm" or any((job.model.factory, job.data.factory, job.loss.factory)):
        raise HarnessError("only jobs of task causal-lm without factories can be exported")
    if job.model.trust_remote_code:
        raise HarnessError(f"a job with {CODE_SWITCH} cannot be exported: its code is not exported")
    if job.adapter.is_present:
        raise HarnessError("a job with an adapter cannot be exported")
    if given := axes_of(job):
        raise HarnessError(
            f"a job with {' and '.join(given)} cannot be exported: the program has no such setting"
        )


def exported_files(
    tool: Tool, label: str, job: Job, layout: BatchLayout, *, world_size: int, device: str, preset: Preset,
    facts: Mapping[str, Any], example: Mapping[str, Any],
) -> dict[str, str]:  # fmt: skip
    """Text by file name. `facts`: of `check_job`; `example`: of `example_of`. Raises HarnessError."""
    strategy, blocks = strategy_of(label), list(facts["layout"]["blocks"])
    found = {"train.py": _part("train"), "samples.json": _json({k: example[k] for k in ("tokens", "labels")})}
    found["model/config.json"] = _json(example["configuration"])
    values: dict[str, Any] = {}
    if strategy.zero_stage is not None:
        count = facts["parameters"]
        config = deepspeed_values(label, job, layout, world_size, device, count, preset)
        found["ds_config.json"] = _json(config)
    else:
        values = torch_values(label, job, world_size, blocks, preset)
    if tool == "accelerate":
        document = accelerate_values(label, job, world_size, device)
        found["accelerate.yaml"] = _json(document)  # JSON is YAML, and what its readers disagree on is quoted
        on_cpu = document.get("use_cpu", False)
        kind = "MULTI_CPU" if on_cpu else document["distributed_type"]
        values = {"arguments": values.get("arguments", {}), "distributed_type": kind}
        found["strategy.py"] = _part("accelerate_strategy")
    elif strategy.zero_stage is not None:
        found["strategy.py"] = _part("deepspeed_strategy")
    else:
        found["strategy.py"] = _part("torch_strategy")
        found["wrap.py"] = _part(f"wrap_{strategy.family}")
    settings = _settings(job, layout, world_size, facts, example) | {"strategy": values}
    if strategy.zero_stage is not None:
        settings["loss_scale"] = None  # it is in ds_config.json
    return found | {"settings.json": _json(settings)}


def require_new_folder(folder: Path) -> None:
    """Raise HarnessError where the folder holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HarnessError(f"'{folder}' exists and is not empty; give a new folder with -o")


def write_folder(folder: Path, found: Mapping[str, str]) -> None:
    """Raises HarnessError where the folder holds something else already."""
    require_new_folder(folder)
    for name, text in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def _settings(
    job: Job, layout: BatchLayout, world_size: int, facts: Mapping[str, Any], example: Mapping[str, Any]
) -> dict[str, Any]:
    """The constants of the job as `train.py` reads them."""
    training, optimizer, precision = job.training, job.optimizer, job.training.precision
    scale = {
        "init_scale": training.initial_loss_scale, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": training.loss_scale_growth_interval,
    }  # fmt: skip
    return {
        "world_size": world_size,
        "global_batch_size": layout.global_batch_size,
        "micro_batch_size": layout.micro_batch_size,
        "accumulation_steps": layout.accumulation_steps,
        "learning_rates": example["learning_rates"],
        "gradient_clipping": training.gradient_clipping,
        "loss_scale": scale if precision == "fp16-mixed" else None,
        "compute_dtype": LOW_DTYPES.get(precision, "bfloat16" if precision == "bf16" else "float32"),
        "pure": precision == "bf16",
        "activation_checkpointing": training.activation_checkpointing,
        "deterministic": training.deterministic,
        "seed": training.seed,
        "optimizer": {
            "betas": [optimizer.beta1, optimizer.beta2], "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay, "foreach": example["foreach"], "fused": example["fused"],
        },
        "decaying": facts["layout"]["decaying"],
        "model": {
            "name": job.model.name, "revision": job.model.revision, "attention": job.model.attention_kernel,
            "pretrained": job.model.name is not None and job.model.weights != "random",
        },
    }  # fmt: skip


def _part(name: str) -> str:
    return (files("harness.exported.parts") / f"{name}.py").read_text(encoding="utf-8")


def _json(document: Any) -> str:
    return json.dumps(document, indent=1) + "\n"
