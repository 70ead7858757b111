"""A folder with a configuration and a program that train what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from harness.backends import registry
from harness.backends.base import BackendOptions, Preset, SetupContext, World
from harness.backends.libraries.facts import offloads
from harness.backends.options import ZeroOptions, gathers_blocks, reduces_each, shard_size
from harness.backends.presets import ROOT_RESHARD, ddp_changes, fsdp2_changes, reduce_dtype_changes
from harness.backends.strategy import FSDP1_STRATEGIES, StrategyKind
from harness.backends.zero.config import zero_config
from harness.errors import HarnessError
from harness.files import write_atomically
from harness.imported.accelerate import RESHARDS, STRATEGIES
from harness.imported.reading import PRECISIONS, PREFETCH
from harness.job.batch import BatchLayout
from harness.job.job import CODE_SWITCH, Job, axes_of

LOW_DTYPES = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def exported_strategy(label: str) -> StrategyKind:
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
    if entry.strategy.of_family.replicates_alone:
        raise HarnessError(f"backend '{entry.name}' cannot be exported; export ddp, which trains alike")
    if entry.strategy.route not in ("native", "accelerate"):
        raise HarnessError(f"backend '{entry.name}' cannot be exported; export the native strategy instead")
    return entry.strategy


def deepspeed_values(
    label: str, job: Job, layout: BatchLayout, world_size: int, device: str, parameters: int, preset: Preset
) -> dict[str, Any]:
    """DeepSpeed's JSON: that of `zero_config`, which a run hands over. Raises HarnessError."""
    _, options = registry.parse(label)
    stage = exported_strategy(label).zero_stage
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
    strategy, low = exported_strategy(label), LOW_DTYPES.get(job.training.precision)
    if strategy.family == "ddp":
        arguments = {c.setting: c.value for c in ddp_changes(preset)}
        return {"arguments": arguments, "autocast": low, "sync_each_batch": reduces_each(options)}
    reduces_in_fp32 = bool(reduce_dtype_changes(job.training.held_precision, preset))
    size = None  # of a shard group; None: one group
    if strategy.facts.has_replicas:
        world = World.planned(world_size, world_size, "cpu")
        size = shard_size(world, getattr(options, "shard_size", None))
    values: dict[str, Any] = {
        "blocks": blocks if getattr(options, "auto_wrap", None) is None else [],
        "param_dtype": low,
        "reduce_dtype": "float32" if reduces_in_fp32 else None,
        "offload": offloads(options),
        "shard_size": size,
        "sync_each_batch": reduces_each(options),
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


OF_BACKEND = {backend: name for name, backend in STRATEGIES.items()}
OF_PREFETCH = {value: name.upper() for name, value in PREFETCH.items()}
OF_PRECISION = {value: name for name, value in PRECISIONS.items() if name != "fp32"}


def accelerate_values(label: str, job: Job, world_size: int, device: str) -> dict[str, Any]:
    """Keys and values. DeepSpeed's own stand in `ds_config.json` next to it. Raises HarnessError."""
    strategy = exported_strategy(label)
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
            "use --to torchrun"
        )
    shared["mixed_precision"] = OF_PRECISION[job.training.precision]
    if strategy.family == "ddp":
        # For MULTI_CPU `accelerate launch` 1.15 needs MPI; this one starts CPU ranks through torchrun.
        return {**shared, "distributed_type": "MULTI_GPU", "use_cpu": device == "cpu"}
    return {**shared, "distributed_type": "FSDP", "fsdp_config": _fsdp(label, job)}


def _fsdp(label: str, job: Job) -> dict[str, Any]:
    entry, options = registry.parse(label)
    version = 2 if exported_strategy(label).family == "fsdp2" else 1
    native = entry.name.removeprefix("accelerate-")
    values: dict[str, Any] = {
        "fsdp_version": version,
        "fsdp_auto_wrap_policy": "NO_WRAP"
        if getattr(options, "auto_wrap", None)
        else "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": offloads(options),
        "fsdp_activation_checkpointing": job.training.activation_checkpointing,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if version == 2:
        reshard = {backend: value for value, backend in RESHARDS.items()}.get(native)
        if reshard is None or getattr(options, "reshard", None) is not None:
            raise HarnessError(f"'{label}' cannot be set in Accelerate's file; use --to torchrun")
        return {**values, "fsdp_reshard_after_forward": reshard}
    prefetch = getattr(options, "backward_prefetch", None) or "pre"
    return {
        **values,
        "fsdp_sharding_strategy": OF_BACKEND[native],
        "fsdp_backward_prefetch": OF_PREFETCH[prefetch],
        "fsdp_forward_prefetch": bool(getattr(options, "forward_prefetch", None)),
        "fsdp_use_orig_params": True,
    }


Tool = Literal["accelerate", "deepspeed", "torchrun"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
LAUNCH = {
    "accelerate": "accelerate launch --config_file accelerate.yaml train.py",
    "deepspeed": "deepspeed --num_gpus {ranks} train.py",
    "torchrun": "torchrun --nproc-per-node {ranks} train.py",
}
"""In the folder; `{ranks}` of one machine."""
ON_CPU = {**LAUNCH, "deepspeed": LAUNCH["torchrun"]}
"""The launcher of DeepSpeed counts accelerators."""


def tool_of(label: str) -> Tool:
    """The tool that usually starts a strategy. Raises HarnessError for one that has no program."""
    strategy = exported_strategy(label)
    if strategy.route == "accelerate":
        return "accelerate"
    return "torchrun" if strategy.zero_stage is None else "deepspeed"


def require_exportable(tool: Tool, label: str, job: Job) -> None:
    """Raise HarnessError for what the tool does not run, or what the example cannot say."""
    strategy = exported_strategy(label)
    if strategy.zero_stage is not None and tool == "torchrun":
        raise HarnessError(f"backend '{label}' is DeepSpeed: use --to deepspeed or --to accelerate")
    if strategy.zero_stage is None and tool == "deepspeed":
        raise HarnessError(f"backend '{label}' is torch's: use --to torchrun or --to accelerate")
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
    strategy, blocks = exported_strategy(label), list(facts["layout"]["blocks"])
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
        each = values.get("sync_each_batch", False)
        values = {
            "arguments": values.get("arguments", {}), "distributed_type": kind, "sync_each_batch": each,
        }  # fmt: skip
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


def write_folder(folder: Path, found: Mapping[str, str]) -> None:
    """Raises HarnessError where the folder holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HarnessError(f"'{folder}' exists and is not empty; give a new folder with -o")
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
