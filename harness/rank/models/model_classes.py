"""The class of transformers that a task takes, and whether it has one for a type of model."""

from __future__ import annotations

from typing import Any

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.factories import class_in_folder, code_arguments, one_at_a_time

OWN_CLASSES = {
    "causal-lm": ("AutoModelForCausalLM",),
    "seq2seq": ("AutoModelForSeq2SeqLM",),
    "classification": ("AutoModelForImageClassification", "AutoModelForSequenceClassification"),
}
"""What a folder with code of its own may bring for a task."""


def in_fp32() -> dict[str, Any]:
    """By what argument transformers builds a model in fp32, whatever its configuration says."""
    import torch
    from packaging.version import Version
    from transformers import __version__

    return {"dtype" if Version(__version__) >= Version("4.56") else "torch_dtype": torch.float32}


def auto_class(job: Job, config: Any) -> Any:
    """transformers' `AutoModel...` for the job. Raises JobError for a type of model without a head for it."""
    import transformers

    return getattr(transformers, _class_name(job, config))


def from_config(job: Job, config: Any, **arguments: Any) -> Any:
    """The model that the job's class makes of a configuration. Raises what transformers raises."""
    library_class = auto_class(job, config)
    with one_at_a_time(job):
        told = code_arguments(job, config, library_class.__name__)
        return library_class.from_config(config, **told, **arguments)


def require_task(job: Job, config: Any) -> None:
    """Raise JobError for a type of model that cannot do the job's task."""
    _class_name(job, config)


def _class_name(job: Job, config: Any) -> str:
    # By name: the public mappings import every model of the library when they are searched.
    from transformers.models.auto import modeling_auto as mappings

    kind, name = config.model_type, job.model.name or config.model_type
    for own in OWN_CLASSES.get(job.task, ()):
        if class_in_folder(job, config, own):
            return own
    if job.task == "causal-lm":
        causal = kind in mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        # BERT and its kin have a causal head, but attend to both sides unless they are made decoders.
        masked = kind in mappings.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        bidirectional = masked and not getattr(config, "is_decoder", False)
        if not causal or bidirectional or getattr(config, "is_encoder_decoder", False):
            raise JobError(
                f"model '{name}' ({kind}) is not a causal language model; choose one such as "
                "llama, gpt2, bloom, qwen2 or mistral, or another task"
            )
        return "AutoModelForCausalLM"
    if job.task == "seq2seq":
        if kind not in mappings.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            raise JobError(
                f"model '{name}' ({kind}) has no encoder and decoder for task seq2seq; choose one such as "
                "t5, bart or marian"
            )
        return "AutoModelForSeq2SeqLM"
    if job.task == "classification":
        if kind in mappings.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
            return "AutoModelForImageClassification"
        if kind in mappings.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            return "AutoModelForSequenceClassification"
        raise JobError(
            f"model '{name}' ({kind}) has no head for task classification; choose one such as bert, "
            "distilbert, vit or resnet"
        )
    return "AutoModel"
