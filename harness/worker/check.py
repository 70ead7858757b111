"""Checks a job before any run begins: data, tokenizer, model and their fit, without building weights."""

from __future__ import annotations

import json
from typing import Any

import torch

from harness.errors import JobError
from harness.spec import Job
from harness.worker.description import describe_layout, describe_model
from harness.worker.loop import describe_data, training_steps
from harness.worker.model import model_config
from harness.worker.optimizer import decaying_names
from harness.worker.samples import Sampler, load_samples


def check_job(job: Job) -> dict[str, Any]:
    """Return facts about the job: model, parameters, samples, steps. Raises JobError if it cannot run.

    `planning.job.planned_model` reads those about the model.
    """
    from transformers import AutoModelForCausalLM

    samples = load_samples(job)
    sampler = Sampler(samples, job)
    config = model_config(job, samples.vocabulary_size)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=job.model.attention_kernel, trust_remote_code=False
            )
    except Exception as error:  # libraries say what a configuration lacks by errors of any kind
        raise JobError(
            f"model '{job.model.name or config.model_type}' cannot be built from its configuration: {error}"
        ) from error
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "architecture": type(model).__name__,
        "model_config": config.to_diff_dict(),
        "data": describe_data(samples, sampler).model_dump(),
        "steps": training_steps(job, sampler),
        "model": describe_model(model).model_dump(mode="json"),
        "layout": describe_layout(model, decaying_names(model, job.optimizer)).model_dump(mode="json"),
        "configuration": json.loads(config.to_json_string(use_diff=False)),
    }
