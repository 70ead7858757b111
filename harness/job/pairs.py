"""Settings of a job that strategies refuse whose ranks share samples: told by names, before ranks start."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

from harness.backends import registry
from harness.backends.libraries.facts import why_not_replaced
from harness.backends.mesh import Dimension
from harness.forms.optimizers import why_not
from harness.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting of how a step is computed."""

    setting: str
    """As one types it."""
    is_set: Callable[[Job], bool]


AXES = (
    Axis(setting="model.compile=block", is_set=lambda job: job.model.compile == "block"),
    Axis(setting="model.compile=model", is_set=lambda job: job.model.compile == "model"),
    Axis(
        setting="training.activation_checkpointing=true",
        is_set=lambda job: job.training.activation_checkpointing is True,
    ),
    Axis(
        setting="training.activation_checkpointing=every-2",
        is_set=lambda job: str(job.training.activation_checkpointing).startswith("every-"),
    ),
    Axis(
        setting="training.activation_checkpointing=selective",
        is_set=lambda job: job.training.activation_checkpointing == "selective",
    ),
    Axis(setting="loss.chunk_tokens=16", is_set=lambda job: job.loss.chunk_tokens is not None),
    Axis(setting="optimizer.kind=adamw-8bit", is_set=lambda job: job.optimizer.kind == "adamw-8bit"),
    Axis(setting="optimizer.kind=adamw-8bit-bnb", is_set=lambda job: job.optimizer.kind == "adamw-8bit-bnb"),
    Axis(setting="adapter.kind=lora", is_set=lambda job: job.adapter.is_present),
    Axis(
        setting="data.document_attention=within", is_set=lambda job: job.data.document_attention == "within"
    ),
)
"""In the order of the table of pairs."""
OTHERS = (
    Axis(setting="evaluation.answer_tokens=8", is_set=lambda job: job.evaluation.answer_tokens is not None),
    Axis(setting="optimizer.groups", is_set=lambda job: bool(job.optimizer.groups)),
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Of settings, where ranks lie along a dimension."""

    dimension: Dimension
    axes: tuple[Axis, ...]
    why: str
    families: tuple[str, ...] = ()
    """Of the strategies that refuse; empty: all with that dimension."""


def _refusals() -> Iterator[Refusal]:
    """Of `pairs.toml`."""
    axes = {axis.setting: axis for axis in (*AXES, *OTHERS)}
    for row in tomllib.loads(files(__package__).joinpath("pairs.toml").read_text("utf-8"))["refusal"]:
        refused, families = tuple(axes[name] for name in row["settings"]), tuple(row.get("families", ()))
        for dimension in row["dimensions"]:
            yield Refusal(dimension=dimension, axes=refused, why=row["why"], families=families)


REFUSALS = tuple(_refusals())


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
    """The same of ranks along a dimension, for strategies of a family."""
    for refusal in REFUSALS:
        if refusal.families and family not in refusal.families:
            continue
        for axis in refusal.axes:
            if refusal.dimension == dimension and axis.is_set(job):
                return f"{axis.setting.partition('=')[0]} along '{dimension}': {refusal.why}"
    return None
