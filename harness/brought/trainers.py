"""Configurations of trainers, often taken for one of Accelerate or DeepSpeed: what to give in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.safe_text import capped


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A tool whose configuration holds everything, and how its file is known."""

    name: str
    keys: frozenset[str]
    """Keys at the top, of which `least` are there."""
    least: int = 1


TRAINERS = (
    Trainer(name="axolotl", keys=frozenset({"base_model", "base_model_config", "sequence_len"})),
    Trainer(name="LLaMA-Factory", keys=frozenset({"finetuning_type", "dataset_dir", "template"})),
    Trainer(name="LLaMA-Factory", keys=frozenset({"stage", "do_train", "model_name_or_path"}), least=2),
    Trainer(name="nanotron", keys=frozenset({"parallelism", "general", "tokens"}), least=2),
    Trainer(name="local SGD", keys=frozenset({
        "local_sgd_steps", "local_sgd", "local_sgd_config", "use_local_sgd", "diloco", "outer_optimizer",
    })),
    Trainer(name="torchtitan", keys=frozenset({"job", "parallelism", "training"}), least=2),
    Trainer(name="NeMo", keys=frozenset({"exp_manager"})),
    Trainer(name="Lightning", keys=frozenset({"trainer", "seed_everything", "model", "data"}), least=2),
    Trainer(name="Megatron", keys=frozenset({
        "tensor_model_parallel_size", "tensor-model-parallel-size", "pipeline_model_parallel_size",
        "pipeline-model-parallel-size", "use_distributed_optimizer", "use-distributed-optimizer",
        "language_model", "model_parallel",
    })),
    Trainer(name="trl", keys=frozenset({"model_name_or_path", "dataset_name", "dataset_mixer"})),
    Trainer(name="Hugging Face Trainer (TrainingArguments)", keys=frozenset({
        "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "output_dir",
        "lr_scheduler_type", "save_strategy", "report_to", "warmup_ratio",
    })),
)  # fmt: skip
FSDP_OF_TRAINER = frozenset({
    "transformer_layer_cls_to_wrap", "min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_settings", "version",
    "reshard_after_forward", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "sync_module_states", "cpu_ram_efficient_loading", "activation_checkpointing", "state_dict_type",
    "auto_wrap_policy",
})  # fmt: skip
"""Keys of Trainer's `fsdp_config`, a file or section of its own."""
COMPONENT = "_component_"
"""torchtune names a class in each of its sections."""
FILES = {
    "deepspeed": "--from-deepspeed", "deepspeed_config": "--from-deepspeed", "ds_config": "--from-deepspeed",
    "deepspeed_config_file": "--from-deepspeed", "accelerate_config": "--from-accelerate",
    "accelerate_config_file": "--from-accelerate",
}  # fmt: skip
"""Keys of trainers that name a file, and the option that takes it."""
MOST_SHOWN = 200
"""Bytes of a path."""
SECTIONS = ("fsdp_config", "fsdp")
"""Keys of trainers that hold FSDP's settings."""


def trainer_of(document: Mapping[str, Any]) -> str | None:
    """What a file is if it is a trainer's, in words; None: none that is known."""
    names = {str(key).removeprefix("fsdp_") for key in document}
    if names and names <= FSDP_OF_TRAINER:
        return "Trainer's fsdp_config"
    if any(isinstance(value, dict) and COMPONENT in value for value in document.values()):
        return "a configuration of torchtune"
    for trainer in TRAINERS:
        if len(trainer.keys & set(document)) >= trainer.least:
            return f"a configuration of {trainer.name}"
    return None


def what_to_give(document: Mapping[str, Any], what: str) -> str:
    """Which file or key of a trainer's configuration to give."""
    if what == "Trainer's fsdp_config":
        return (
            "Put these keys under 'fsdp_config' of an Accelerate file with 'distributed_type: FSDP', and "
            "give that with --from-accelerate."
        )
    for key, value in _nested(document):
        option = FILES.get(key.rpartition(".")[2])
        if option and isinstance(value, str) and value:
            path = capped(" ".join(value.split()), MOST_SHOWN)
            return f"Its key '{key}' names the file to give: {option} {path}"
        if option and isinstance(value, dict) and value:
            return f"Save its section '{key}' as a file of its own, and give that with {option}."
    for key in SECTIONS:
        if document.get(key):
            return (
                f"Put its key '{key}' under 'fsdp_config' of an Accelerate file with 'distributed_type: "
                "FSDP', and give that with --from-accelerate."
            )
    return (
        "It names no file of DeepSpeed or Accelerate: give the one of its launcher (accelerate launch "
        "--config_file FILE: --from-accelerate FILE), or choose a strategy with --backends."
    )


def _nested(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys, dotted, those at the top first."""
    for key, value in document.items():
        yield f"{prefix}{key}", value
    for key, value in document.items():
        if isinstance(value, dict) and str(key) not in FILES:
            yield from _nested(value, f"{prefix}{key}.")
