"""Settings of a job that strategies refuse whose ranks share samples: told by names, before ranks start."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from harness.backends import registry
from harness.backends.libraries.facts import why_not_replaced
from harness.backends.mesh import Dimension
from harness.forms.optimizers import why_not
from harness.job.job import Job

AXES: dict[str, Callable[[Job], bool]] = {
    "model.compile=block": lambda job: job.model.compile == "block",
    "model.compile=model": lambda job: job.model.compile == "model",
    "training.activation_checkpointing=true": lambda job: job.training.activation_checkpointing is True,
    "training.activation_checkpointing=every-2": (
        lambda job: str(job.training.activation_checkpointing).startswith("every-")
    ),
    "training.activation_checkpointing=selective": (
        lambda job: job.training.activation_checkpointing == "selective"
    ),
    "loss.chunk_tokens=16": lambda job: job.loss.chunk_tokens is not None,
    "optimizer.kind=adamw-8bit": lambda job: job.optimizer.kind == "adamw-8bit",
    "optimizer.kind=adamw-8bit-bnb": lambda job: job.optimizer.kind == "adamw-8bit-bnb",
    "adapter.kind=lora": lambda job: job.adapter.is_present,
    "data.document_attention=within": lambda job: job.data.document_attention == "within",
}
"""Settings of how a step is computed, as one types them, with whether a job has them; in the order of the
table of pairs."""
IS_SET = AXES | {
    "evaluation.answer_tokens=8": lambda job: job.evaluation.answer_tokens is not None,
    "optimizer.groups": lambda job: bool(job.optimizer.groups),
}
REFUSALS: list[dict[str, Any]] = tomllib.loads(
    files(__package__).joinpath("pairs.toml").read_text("utf-8")
)["refusal"]  # fmt: skip


def why_refused(label: str, world_size: int, job: Job) -> str | None:
    """Why a built-in backend refuses a setting of the job, which is named; None: it refuses none of them."""
    entry, options = registry.parse(label)
    if entry.is_third_party:
        return None
    strategy = entry.strategy
    family = strategy.family if strategy else None
    reasons = [why_refused_along(name, job, family) for name, _ in registry.mesh_of(label, world_size).sizes]
    if strategy is not None:
        reasons.append(why_not(job.optimizer.kind, strategy, job.training.precision))
        reasons.append(why_not_replaced(options, job.optimizer.kind))
    return next((reason for reason in reasons if reason is not None), None)


def why_refused_along(dimension: Dimension, job: Job, family: str | None = None) -> str | None:
    """Why strategies of a family refuse a setting of the job along a dimension; None: they do not."""
    for refusal in REFUSALS:
        if dimension not in refusal["dimensions"] or family not in refusal.get("families", [family]):
            continue
        for setting in refusal["settings"]:
            if IS_SET[setting](job):
                return f"{setting.partition('=')[0]} along '{dimension}': {refusal['why']}"
    return None
