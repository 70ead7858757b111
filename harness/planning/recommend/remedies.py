"""What would make a model fit: more ranks to shard over, or a parallelism that divides the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from harness.planning.recommend.predict import Configuration, Predictors, best_configuration
from harness.planning.recommend.question import Question
from harness.tell.formats import gigabytes

Tool = Literal[
    "more GPUs", "fewer GPUs", "larger batch", "smaller batch", "tensor", "pipeline", "context", "expert",
]  # fmt: skip
MOST_GPUS = 16_384
MOST_CONTEXT = 64


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One way out and the figure that sizes it."""

    tool: Tool
    degree: int | None
    """GPUs that share one copy, or the number of GPUs; None: it has none."""
    reason: str


def predicted_remedies(shared: Sequence[Configuration]) -> Iterator[Remedy]:
    """The fastest configuration that fits of each way to share samples; `shared`: all such, fastest first."""
    found: dict[Tool, Configuration] = {}
    for configuration in shared:
        if configuration.fits:
            found.setdefault(tool_of(configuration), configuration)
    for tool, configuration in found.items():
        rate = (
            f", {configuration.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
            if configuration.speed
            else ""
        )
        yield Remedy(
            tool=tool,
            degree=degree_of(configuration),
            reason=f"{configuration.label} fits at micro-batch {configuration.micro_batch_size}: "
            f"{gigabytes(configuration.needed_bytes)} GB{rate}",
        )


def tool_of(configuration: Configuration) -> Tool:
    """How the ranks of a configuration that share samples do so."""
    strategy = configuration.variant.strategy
    if strategy.facts.cuts_layers:
        return "pipeline"
    return "tensor" if "tensor" in configuration.variant.options else "context"


def degree_of(configuration: Configuration) -> int:
    """Ranks that share samples."""
    options = configuration.variant.options
    return int(next(options[name] for name in ("tensor", "sequence", "stages") if options.get(name)))


def memory_remedies(
    question: Question,
    smallest: Configuration,
    predictors: Predictors,
    shared: Sequence[Configuration] = (),
) -> Iterator[Remedy]:
    """Ways to make the configuration fit that needs least; each is predicted where a prediction can tell.

    `shared`: configurations whose ranks share samples; what is predicted of them replaces lower bounds.
    """
    if _fits_without_accumulation(question, smallest, predictors):
        tokens = question.gpus * question.sequence_length
        reason = f"{smallest.label} fits at {tokens:,} tokens: one sample a GPU, no gradients accumulate"
        yield Remedy(tool="smaller batch", degree=None, reason=reason)
    gpus = _enough_gpus(question, smallest, predictors)
    if gpus is not None:
        yield Remedy(
            tool="more GPUs", degree=gpus, reason=f"{smallest.label} fits: each holds less of the states"
        )
    tried = {tool_of(configuration) for configuration in shared}
    yield from predicted_remedies(shared)
    if any(configuration.fits for configuration in shared):
        return
    context = _enough_context(question, smallest, predictors)
    if context is not None and ("context" not in tried or context > question.gpus_per_node):
        reason = (
            f"each GPU then holds activations of {question.sequence_length // context:,} tokens of a sample: "
            f"fsdp-cp:sequence={context} or ulysses-zero3:sequence={context}"
        )
        yield Remedy(tool="context", degree=context, reason=reason)
    yield from (r for r in _model_parallel(question, smallest) if r.tool not in tried)


def power_of_two(value: float) -> int:
    """The smallest power of two that is not below `value`."""
    power = 1
    while power < value:
        power *= 2
    return power


def _fits_without_accumulation(question: Question, smallest: Configuration, predictors: Predictors) -> bool:
    """Whether one sample a GPU and step fits: gradients that accumulate may not be sharded."""
    tokens = question.gpus * question.sequence_length
    return question.samples_per_rank > 1 and _fits(
        replace(question, tokens_asked=tokens), smallest, predictors
    )


def _enough_gpus(question: Question, smallest: Configuration, predictors: Predictors) -> int | None:
    """The number of GPUs, doubled, on which it fits with the same tokens per step; None: there is none."""
    gpus = question.gpus * 2
    while gpus <= min(MOST_GPUS, question.samples_asked):
        per_node = question.gpus_per_node if question.nodes > 1 else min(gpus, 8)
        larger = replace(question, gpus=gpus, gpus_per_node=per_node)
        if _fits(larger, smallest, predictors):
            return gpus
        gpus *= 2
    return None


def _enough_context(question: Question, smallest: Configuration, predictors: Predictors) -> int | None:
    """Among how many GPUs a sample must be divided, all else equal; None: that is not what is too much."""
    degree = 2
    while degree <= MOST_CONTEXT and question.sequence_length // degree >= 2:
        data = question.job.data.model_copy(update={"sequence_length": question.sequence_length // degree})
        shorter = replace(
            question,
            job=question.job.model_copy(update={"data": data}),
            tokens_asked=question.samples_asked * data.sequence_length,
        )
        if _fits(shorter, smallest, predictors):
            return degree
        degree *= 2
    return None


def _fits(question: Question, like: Configuration, predictors: Predictors) -> bool:
    """Whether the variant fits another question."""
    return best_configuration(
        question, like.variant, predictors, checkpointing=like.checkpointing, with_speed=False
    ).fits


def _model_parallel(question: Question, smallest: Configuration) -> Iterator[Remedy]:
    """Tensor parallelism within a node divides all of it; pipeline stages what is then still too large."""
    overhead = smallest.needed_bytes - smallest.memory.peak_bytes
    degree = power_of_two(smallest.memory.peak_bytes / (smallest.memory_bytes - overhead))
    inside = min(degree, power_of_two(question.gpus_per_node / 2 + 0.5))
    left = smallest.memory.peak_bytes / inside
    yield Remedy(
        tool="tensor",
        degree=inside,
        reason=f"divides weights, gathered layers and activations within a node: {gigabytes(left)} GB a GPU",
    )
    if degree > inside:
        stages = ceil(degree / inside)
        yield Remedy(
            tool="pipeline", degree=stages, reason="stages divide what tensor parallelism leaves too large"
        )
