"""Checks a job before any run begins, without building weights, and gives its first steps as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import nn

from harness.backends.model.blocks import parameter_count
from harness.backends.refusals import suggestion
from harness.errors import HarnessError, JobError
from harness.job.job import CODE_SWITCH, Job, OptimizerSection
from harness.rank.data import Sampler, Samples, load_samples
from harness.rank.initial_weights import why_whole
from harness.rank.loop import describe_data, training_steps
from harness.rank.models.changes import enable_checkpointing
from harness.rank.models.description import (
    describe_geometry,
    describe_layout,
    describe_model,
    find_module_uses,
)
from harness.rank.models.losses import loss_function
from harness.rank.models.model import (
    add_adapters,
    build_own_model,
    declare_blocks,
    from_config,
    hold_frozen,
    in_fp32,
    model_config,
)
from harness.rank.models.optimizer import (
    FOREACH_AND_FUSED,
    build_optimizer,
    frozen_names,
    learning_rate,
    update_groups,
)
from harness.safe_text import first_line


def check_job(job: Job) -> dict[str, Any]:
    """Return facts about the job: model, parameters, samples, steps. Raises JobError if it cannot run."""
    samples = load_samples(job)
    sampler = Sampler(samples, job)
    return {
        **model_facts(job, samples),
        "data": describe_data(samples, sampler).model_dump(),
        "steps": training_steps(job, sampler),
    }


def check_text(job: str) -> dict[str, Any]:
    """`check_job` of a job's JSON, for a process that the launcher asks."""
    return check_job(Job.model_validate_json(job))


def model_facts(job: Job, samples: Samples | None = None) -> dict[str, Any]:
    """Facts about the model, which `plan.scenario.planned_model` reads. Raises JobError.

    samples: None: they are read; the batch may be open.
    """
    samples = load_samples(job) if samples is None else samples
    config = model_config(job, samples.facts)
    try:
        with torch.device("meta"):
            model: nn.Module = (
                build_own_model(job)
                if config is None
                else from_config(job, config, attn_implementation=job.model.attention_kernel)
            )
    except Exception as error:  # libraries say what a configuration lacks by errors of any kind
        if config is not None:
            name = job.model.name or config.model_type
            why = first_line(error)
            raise JobError(f"model '{name}' cannot be built from its configuration: {why}") from error
        if not isinstance(error, JobError):
            raise
        model = build_own_model(job)  # the user's function needs memory
    declare_blocks(model, job.model)
    if config is None and job.training.activation_checkpointing:
        enable_checkpointing(model, job.training.activation_checkpointing)
    add_adapters(job, model)
    hold_frozen(job, model)
    loss_function(job, model)
    if job.optimizer.factory is not None:
        build_optimizer(
            model.named_parameters(), job.optimizer, update_groups(model, job.optimizer), frozen_names(model)
        )
    numbers = {
        name: field for name, field in samples.fields.items() if field.dtype == torch.int64 and len(field)
    }
    largest = {name: int(field.max()) for name, field in numbers.items()}
    uses = find_module_uses(job, model, config, samples.batch([0, 0]), largest)
    layout = describe_layout(model, update_groups(model, job.optimizer), uses)
    return {
        "parameters": parameter_count(model),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "architecture": type(model).__name__,
        "model_config": config.to_diff_dict() if config is not None else {},
        "model": describe_model(model).model_dump(mode="json") | {"whole_because": why_whole(job, "slices")},
        "layout": to_jsonable_python(layout),
        "configuration": json.loads(config.to_json_string(use_diff=False)) if config is not None else {},
    }


def describe_on_meta(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Build the causal language model that transformers makes of a configuration, on the meta device.

    Returns fields of `plan.model.PlannedModel`. Raises HarnessError for a type that transformers does not
    know, or that is no dense causal model.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(config)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING and values.get("auto_map"):
        raise HarnessError(
            f"{source}: model_type '{model_type}' needs custom code (auto_map), which does not run for "
            f"--model; give a job with --config that sets model.name and {CODE_SWITCH}: true, or a model of "
            "the catalogue with the same shapes (`harness estimate --list models`)"
        )
    if model_type not in CONFIG_MAPPING:
        raise HarnessError(
            f"{source}: model_type '{model_type}' is unknown to transformers. "
            f"{suggestion(model_type, list(CONFIG_MAPPING.keys()), most=3) or 'See its list of models'}"
        )
    try:
        built = CONFIG_MAPPING[model_type](**values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, trust_remote_code=False, **in_fp32())
    except Exception as error:  # whatever a model's class makes of values that it does not expect
        raise HarnessError(f"{source} cannot be built: {first_line(error)}") from error
    geometry = describe_geometry(model)
    if geometry is None:
        raise HarnessError(
            f"{source} is not covered: it is no dense decoder with known layers, heads and hidden size"
        )
    return {
        "architecture": type(model).__name__,
        "config": built.to_dict(),
        "layout": describe_layout(model, update_groups(model, OptimizerSection())),
        **vars(geometry),
    }


def example_of(request: str) -> dict[str, Any]:
    """Samples and learning rates of the first steps, and the model's configuration.

    `request`: JSON with `job`, whose global batch is resolved, and `steps`. Raises JobError.
    """
    asked = json.loads(request)
    job = Job.model_validate(asked["job"])
    samples = load_samples(job)
    sampler = Sampler(samples, job)
    config = model_config(job, samples.facts)
    if config is None:
        raise JobError("a model from model.factory cannot be exported: import your own function instead")
    total = training_steps(job, sampler)
    steps = range(min(asked["steps"], total))
    batch = samples.batch([i for step in steps for i in sampler.step_ids(step)])
    foreach, fused = FOREACH_AND_FUSED[job.optimizer.implementation]
    return {
        "tokens": batch["tokens"].tolist(),
        "labels": batch["labels"].tolist(),
        "learning_rates": [learning_rate(step, total, job.optimizer, job.schedule) for step in steps],
        "configuration": config.to_diff_dict(),
        "foreach": foreach,
        "fused": fused,
    }
