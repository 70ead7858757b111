"""Settings of a job that strategies refuse whose ranks share samples: told by names, before ranks start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.backends import registry
from harness.backends.mesh import Dimension
from harness.forms.optimizer_states import why_not
from harness.job.job import Job

SHARED: tuple[Dimension, ...] = ("sequence", "pipeline", "tensor")
"""Along which ranks share samples."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting of how a step is computed."""

    setting: str
    """As one types it."""
    is_set: Callable[[Job], bool]


COMPILE_BLOCK = Axis(setting="model.compile=block", is_set=lambda job: job.model.compile == "block")
COMPILE_MODEL = Axis(setting="model.compile=model", is_set=lambda job: job.model.compile == "model")
ALL_BLOCKS = Axis(
    setting="training.activation_checkpointing=true",
    is_set=lambda job: job.training.activation_checkpointing is True,
)
SOME_BLOCKS = Axis(
    setting="training.activation_checkpointing=every-2",
    is_set=lambda job: str(job.training.activation_checkpointing).startswith("every-"),
)
SELECTIVE = Axis(
    setting="training.activation_checkpointing=selective",
    is_set=lambda job: job.training.activation_checkpointing == "selective",
)
CHUNKS = Axis(setting="loss.chunk_tokens=16", is_set=lambda job: job.loss.chunk_tokens is not None)
ADAPTERS = Axis(setting="adapter.kind=lora", is_set=lambda job: job.adapter.is_present)
DOCUMENTS = Axis(
    setting="data.document_attention=within", is_set=lambda job: job.data.document_attention == "within"
)
LOW_BIT = Axis(setting="optimizer.kind=adamw-8bit", is_set=lambda job: job.optimizer.kind == "adamw-8bit")
LOW_BIT_BNB = Axis(
    setting="optimizer.kind=adamw-8bit-bnb", is_set=lambda job: job.optimizer.kind == "adamw-8bit-bnb"
)
ANSWERS = Axis(
    setting="evaluation.answer_tokens=8", is_set=lambda job: job.evaluation.answer_tokens is not None
)
GROUPS = Axis(setting="optimizer.groups", is_set=lambda job: bool(job.optimizer.groups))
AXES = (
    COMPILE_BLOCK, COMPILE_MODEL, ALL_BLOCKS, SOME_BLOCKS, SELECTIVE, CHUNKS, LOW_BIT, LOW_BIT_BNB, ADAPTERS,
    DOCUMENTS,
)  # fmt: skip
"""In the order of the table of pairs."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Of settings, where ranks lie along a dimension."""

    dimension: Dimension
    axes: tuple[Axis, ...]
    why: str
    families: tuple[str, ...] = ()
    """Of the strategies that refuse; empty: all with that dimension."""


REFUSALS = (
    Refusal(
        dimension="sequence", axes=(DOCUMENTS,),
        why="documents kept apart need a mask, which divided attention does not take",
    ),
    Refusal(
        dimension="sequence", axes=(COMPILE_BLOCK, COMPILE_MODEL),
        why="context_parallel and Ulysses replace attention while a model runs, which was not tried with "
        "compiled ones (torch 2.13, DeepSpeed 0.19.8); use model.compile=none",
    ),
    *(
        Refusal(
            dimension=dimension, axes=(GROUPS,),
            why="groups of the optimizer were not validated against the reference where ranks share samples",
        )
        for dimension in SHARED
    ),
    Refusal(
        dimension="sequence", axes=(ANSWERS,),
        why="texts grow by one token at a time, which ranks cannot divide; set evaluation.answer_tokens=null",
    ),
    Refusal(
        dimension="pipeline", axes=(DOCUMENTS,),
        why="stages pass hidden states on, not the positions that keep documents apart; use "
        "data.document_attention=across",
    ),
    Refusal(
        dimension="pipeline", axes=(ADAPTERS,),
        why="stages are cut for models that train all parameters, not for adapters",
    ),
    Refusal(
        dimension="pipeline", axes=(COMPILE_BLOCK, COMPILE_MODEL),
        why="stages are copies of the model's modules, which are not compiled; use model.compile=none",
    ),
    Refusal(
        dimension="tensor", axes=(CHUNKS,),
        why="the output layer is cut by tokens, and a loss in chunks needs all of its rows; set "
        "loss.chunk_tokens=null",
    ),
    Refusal(
        dimension="tensor", axes=(ADAPTERS,),
        why="whole models are cut only: adapters beside frozen layers have no plan",
    ),
    Refusal(
        dimension="tensor", axes=(SELECTIVE,), families=("zero12-tensor", "zero3-tensor"),
        why="DeepSpeed 0.19.8 adds up the outputs of cut layers in place (RowParallel.forward), so that what "
        "recomputation kept of them is added up twice and gradients are wrong; use true or every-N",
    ),
    Refusal(
        dimension="tensor", axes=(COMPILE_MODEL,), families=("fsdp2-tensor",),
        why="torch 2.13's compiler fails on cut layers within FSDP2 (inductor: 'Node was invalid, but is "
        "output'); use model.compile=block",
    ),
)  # fmt: skip


def why_refused(label: str, world_size: int, job: Job) -> str | None:
    """Why a built-in backend refuses a setting of the job, which is named; None: it refuses none of them."""
    entry, _ = registry.parse(label)
    if entry.is_third_party:
        return None
    strategy = entry.strategy
    family = strategy.family if strategy else None
    reasons = [why_refused_along(name, job, family) for name, _ in registry.mesh_of(label, world_size).sizes]
    if strategy is not None:
        reasons.append(why_not(job.optimizer.kind, strategy, job.training.precision))
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
