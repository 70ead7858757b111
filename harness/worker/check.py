"""Checks a job before any run begins: data, tokenizer, model and their fit, without building weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.errors import JobError
from harness.spec import Job
from harness.worker.adapter import add_adapters, hold_frozen
from harness.worker.checkpointed import enable_checkpointing
from harness.worker.description import describe_layout, describe_model
from harness.worker.gradient_flow import modules_without_gradient
from harness.worker.loading.own_skeleton import why_whole
from harness.worker.loop import describe_data, training_steps
from harness.worker.losses import loss_function
from harness.worker.model import model_config
from harness.worker.model_classes import from_config
from harness.worker.module_uses import irregular_uses
from harness.worker.optimizer import decaying_names
from harness.worker.own_model import build_own_model, declare_blocks
from harness.worker.samples import Sampler, Samples, load_samples

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_job(job: Job) -> dict[str, Any]:
    """Return facts about the job: model, parameters, samples, steps. Raises JobError if it cannot run."""
    samples = load_samples(job)
    sampler = Sampler(samples, job)
    return {
        **model_facts(job, samples),
        "data": describe_data(samples, sampler).model_dump(),
        "steps": training_steps(job, sampler),
    }


def read_model_facts(job: Job) -> dict[str, Any]:
    """Those about the model of a job whose batch may be open yet. Raises JobError."""
    return model_facts(job, load_samples(job))


def model_facts(job: Job, samples: Samples) -> dict[str, Any]:
    """Those about the model, which `planning.job.planned_model` reads. Raises JobError."""
    config = model_config(job, samples.facts)
    model = _without_weights(job, config)
    declare_blocks(model, job.model)
    if config is None and job.training.activation_checkpointing:
        enable_checkpointing(model, job.training.activation_checkpointing)
    add_adapters(job, model)
    hold_frozen(job, model)
    loss_function(job, model)
    layout = describe_layout(
        model,
        decaying_names(model, job.optimizer),
        modules_without_gradient(job, config),
        irregular_uses(job, model, samples.batch([0, 0])),
    )
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "architecture": type(model).__name__,
        "model_config": config.to_diff_dict() if config is not None else {},
        "model": describe_model(model).model_dump(mode="json") | {"whole_because": why_whole(job, "slices")},
        "layout": layout.model_dump(mode="json"),
        "configuration": json.loads(config.to_json_string(use_diff=False)) if config is not None else {},
    }


def _without_weights(job: Job, config: PretrainedConfig | None) -> nn.Module:
    """The model on the meta device; one of the user's own whole where its function needs memory."""
    if config is None:
        try:
            with torch.device("meta"):
                return build_own_model(job)
        except JobError:
            return build_own_model(job)
    try:
        with torch.device("meta"):
            model: nn.Module = from_config(job, config, attn_implementation=job.model.attention_kernel)
            return model
    except Exception as error:  # libraries say what a configuration lacks by errors of any kind
        raise JobError(
            f"model '{job.model.name or config.model_type}' cannot be built from its configuration: {error}"
        ) from error
