"""The first steps of a job as plain values, for a program outside of the harness."""

from __future__ import annotations

import json
from typing import Any

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data.samples import Sampler, load_samples
from harness.rank.loop import training_steps
from harness.rank.models.model import model_config
from harness.rank.models.optimizer import FOREACH_AND_FUSED, learning_rate


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
