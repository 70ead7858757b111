"""Where a setting stands, by its name alone or by the name that other tools give it."""

from __future__ import annotations

from collections.abc import Mapping

from harness.spec import Experiment, Section

OTHER_TOOLS = {
    "batch_size": ("training.global_batch_size", "training.micro_batch_size"),
    "betas": ("optimizer.beta1", "optimizer.beta2"),
    "bf16": ("training.precision",),
    "dataset": ("data.path", "data.source"),
    "dtype": ("training.precision",),
    "eps": ("optimizer.epsilon",),
    "eval_steps": ("evaluation.every_steps",),
    "fp16": ("training.precision",),
    "grad_clip": ("training.gradient_clipping",),
    "gradient_accumulation_steps": ("training.accumulation_steps",),
    "gradient_checkpointing": ("training.activation_checkpointing",),
    "lr": ("optimizer.learning_rate",),
    "lr_scheduler_type": ("schedule.kind",),
    "max_grad_norm": ("training.gradient_clipping",),
    "max_length": ("data.sequence_length",),
    "max_seq_length": ("data.sequence_length",),
    "max_steps": ("training.steps",),
    "mixed_precision": ("training.precision",),
    "model_name": ("model.name",),
    "model_name_or_path": ("model.name",),
    "nproc": ("compare.world_sizes",),
    "num_epochs": ("training.epochs",),
    "num_processes": ("compare.world_sizes",),
    "num_train_epochs": ("training.epochs",),
    "per_device_train_batch_size": ("training.micro_batch_size",),
    "tokenizer_name": ("data.tokenizer",),
    "torch_dtype": ("training.precision",),
    "train_batch_size": ("training.global_batch_size",),
    "train_micro_batch_size_per_gpu": ("training.micro_batch_size",),
    "warmup": ("schedule.warmup_steps", "measure.warmup_steps"),
    "zero_stage": ("compare.backends",),
}
"""Names of arguments of Trainer, Accelerate and DeepSpeed."""


def settings_by_name() -> Mapping[str, tuple[str, ...]]:
    """Dotted settings by their last word and by other tools' names, in small letters."""
    found: dict[str, tuple[str, ...]] = dict(OTHER_TOOLS)
    for section, field in Experiment.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key in field.annotation.model_fields:
                found[key] = (*found.get(key, ()), f"{section}.{key}")
    return found
