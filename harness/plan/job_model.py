"""The model of a job, before any of its runs."""

from __future__ import annotations

from harness.errors import HarnessError
from harness.job.job import DEFAULT_TASK, Job
from harness.launch.launcher import require_libraries
from harness.plan.job import planned_model
from harness.plan.model import PlannedModel
from harness.plan.models import from_config, load_model

BYTES_VOCABULARY = 257
"""Of the tokenizer 'bytes': 256 values and the end of a text (`rank.data.tokens`, which a test compares)."""


def job_model(job: Job, named: str | None = None) -> PlannedModel:
    """The model that `--model` names, else the job's: by name as `load_model` finds it or of `model.config`.

    Of another task than causal-lm, where model or data come from a factory, where code of the model's folder
    may run, and where groups of the optimizer freeze parameters, it is built without weights, which imports
    torch and reads the job's data: they decide classes and vocabulary, and where gradients go. Raises
    HarnessError; a vocabulary that only a tokenizer knows must be given.
    """
    if named is not None:
        return load_model(named)
    own = job.model.factory or job.data.factory or job.model.trust_remote_code
    if job.task != DEFAULT_TASK or own or job.optimizer.freezes:
        return _built(job)
    if job.model.name is not None:
        return load_model(job.model.name)
    config = job.model.config_values()
    if "vocab_size" not in config:
        if job.data.tokenizer != "bytes":
            raise HarnessError(
                f"model.config needs vocab_size: only the tokenizer '{job.data.tokenizer}' knows it; "
                "or name a model with --model"
            )
        config["vocab_size"] = BYTES_VOCABULARY
    return from_config(config, name=str(config["model_type"]), source="model.config", given_whole=False)


def _built(job: Job) -> PlannedModel:
    require_libraries("plans of a job whose model or data must be built first")
    from harness.rank.check import read_model_facts  # loads torch and transformers

    return planned_model(read_model_facts(job), job)
