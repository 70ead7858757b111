"""Builds the job's model, equal on every rank, and the loss that every backend computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.backends.explain import choices, suggestion
from harness.backends.precision import COMPUTE_DTYPES
from harness.errors import JobError
from harness.spec import Job, ModelSection
from harness.worker.samples import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def summed_cross_entropy(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token, summed over the batch's target tokens: a scalar, fp32.

    batch: `tokens` and `labels`, int64 (samples, length). Padding stands on the right, so causal
    attention keeps it away from every target and no mask is needed.
    """
    logits = module(input_ids=batch["tokens"], use_cache=False).logits
    return functional.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.shape[-1]),
        batch["labels"][:, 1:].reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def model_config(job: Job, vocabulary_size: int) -> PreTrainedConfig:
    """The Hugging Face configuration of the job's model, checked against data and loop.

    Raises JobError: unknown type or key, not a causal language model, context or vocabulary too small.
    """
    config = _named_config(job.model) if job.model.name else _given_config(job.model, vocabulary_size)
    _check_causal(config, job.model.name or config.model_type)
    if job.model.dropout is not None:
        set_dropout(config, job.model.dropout)
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and job.data.sequence_length > context:
        raise JobError(
            f"data.sequence_length {job.data.sequence_length} is longer than the model's context of "
            f"{context} positions; shorten it or choose a model with a longer context"
        )
    if vocabulary_size > config.vocab_size:
        raise JobError(
            f"the tokenizer has {vocabulary_size} ids but the model's vocab_size is "
            f"{config.vocab_size}; raise model.config.vocab_size or change data.tokenizer"
        )
    return config


def build_model(job: Job, config: PreTrainedConfig) -> nn.Module:
    """The whole model on the CPU: fp32, or bf16 for precision 'bf16'.

    At a mixed precision the initial weights are rounded to the compute dtype: DeepSpeed copies its fp32
    masters from low-precision weights, and every backend must start from the same numbers.
    """
    model = draw_model(job, config)
    finish_model(job, model)
    return model


def draw_model(job: Job, config: PreTrainedConfig, *, pretrained: bool = True) -> nn.Module:
    """The model in fp32 as the library makes it: random weights from the seed, or those of a checkpoint.

    `pretrained`: False leaves a checkpoint's weights unread.
    """
    from transformers import AutoModelForCausalLM

    arguments: dict[str, Any] = {
        "attn_implementation": job.model.attention_kernel,
        "dtype": torch.float32,
        "trust_remote_code": False,
    }
    torch.manual_seed(job.training.seed)
    try:
        if pretrained and job.model.name is not None and reads_checkpoint(job):
            return AutoModelForCausalLM.from_pretrained(
                job.model.name, config=config, revision=job.model.revision, **arguments
            )
        return AutoModelForCausalLM.from_config(config, **arguments)
    except (OSError, ValueError, ImportError) as error:
        raise JobError(f"model '{job.model.name or config.model_type}': {_first_line(error)}") from error


def reads_checkpoint(job: Job) -> bool:
    """Whether the initial weights are those of a checkpoint."""
    return job.model.name is not None and job.model.weights != "random"


def finish_model(job: Job, model: nn.Module) -> None:
    """Put the job's precision and checkpointing on a model as the library made it."""
    if job.training.activation_checkpointing:
        enable_checkpointing(model)
    compute = COMPUTE_DTYPES[job.training.precision]
    if compute is not torch.float32:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(compute).float())
    if job.training.precision == "bf16":
        nn.Module.to(model, torch.bfloat16)
    model.train()


def enable_checkpointing(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def uses_checkpointing(model: nn.Module) -> bool:
    """Whether blocks recompute their activations; transformers 5 renamed the property."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    raise AttributeError(f"{type(model).__name__} does not say whether it checkpoints activations")


def _given_config(model: ModelSection, vocabulary_size: int) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    values = {"vocab_size": vocabulary_size} | model.config_values()
    model_type = values.pop("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise JobError(
            f"model.config.model_type '{model_type}' is unknown to transformers. "
            f"{suggestion(str(model_type), list(CONFIG_MAPPING.keys()), most=3) or 'See its list of models'}"
        )
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    _check_causal(default, model_type)
    known = set(default.to_dict()) | set(getattr(config_class, "attribute_map", {}))
    for key in values:
        if key not in known:
            raise JobError(
                f"model.config.{key} is no setting of {model_type}. Allowed: {choices(key, sorted(known))}"
            )
    try:
        return config_class(**values)
    except (ValueError, TypeError) as error:
        raise JobError(f"model.config is refused by {model_type}: {_first_line(error)}") from error
    except Exception as error:  # huggingface_hub's strict dataclasses raise their own hierarchy
        if "Validation" not in type(error).__name__:
            raise
        raise JobError(f"model.config is refused by {model_type}: {_first_line(error)}") from error


def _named_config(model: ModelSection) -> PreTrainedConfig:
    from transformers import AutoConfig

    assert model.name is not None
    try:
        return AutoConfig.from_pretrained(model.name, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise JobError(
            f"model.name '{model.name}' cannot be loaded: {_first_line(error)} "
            "Give a local folder, or a hub name this machine can reach"
        ) from error


def _check_causal(config: PreTrainedConfig, name: str) -> None:
    # By name: the public mappings import every model of the library when they are searched.
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT and its kin have a causal head, but attend to both sides unless they are made decoders.
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    bidirectional = masked and not getattr(config, "is_decoder", False)
    if not causal or bidirectional or getattr(config, "is_encoder_decoder", False):
        raise JobError(
            f"model '{name}' ({config.model_type}) is not a causal language model; choose one such as "
            "llama, gpt2, bloom, qwen2 or mistral"
        )


def set_dropout(config: PreTrainedConfig, probability: float) -> None:
    """Write the probability to every dropout of a configuration."""
    for key, value in config.to_dict().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if "dropout" in key or key.endswith("pdrop"):
                setattr(config, key, probability)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else repr(error)
    if line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1]}"
    return line if line.endswith((".", "?", "!")) else line + "."
