"""Says when data parallelism alone is the wrong tool, and which other parallelism is called for.

The steps are those of the Ultra-Scale Playbook (Nouamane Tazi et al., Hugging Face 2025, 'finding the best
training configuration'): fit the model, reach the global batch, raise throughput. Where the guide names
numbers of GPUs, what they stand for is computed: bytes that do not fit, communication that nothing hides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from harness.errors import HarnessError
from harness.judge.wording import percent
from harness.plan.hardware import joined_by
from harness.plan.leading import CLOSE_SHARE, IN_WORDS, rate
from harness.plan.prediction import Predictors
from harness.plan.recommend.predict import Configuration, best_configuration, smallest_need
from harness.plan.recommend.question import RecommendRequest
from harness.tell.formats import gigabytes, number

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
        yield Remedy(tool=tool, degree=degree_of(configuration), reason=_fits_with(configuration))


def tool_of(configuration: Configuration) -> Tool:
    """How the ranks of a configuration that share samples do so."""
    strategy = configuration.scenario.strategy
    if strategy.facts.cuts_layers:
        return "pipeline"
    return "tensor" if "tensor" in configuration.scenario.options else "context"


def degree_of(configuration: Configuration) -> int:
    """Ranks that share samples."""
    options = configuration.scenario.options
    return int(next(options[name] for name in ("tensor", "sequence", "stages") if options.get(name)))


def memory_remedies(
    question: RecommendRequest,
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
    if (enough := _enough_gpus(question, smallest, predictors)) is not None:
        gpus, there = enough
        yield Remedy(
            tool="more GPUs", degree=gpus, reason=f"{_fits_with(there)}; each holds less of the states"
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


def next_power_of_two(value: float) -> int:
    """The smallest power of two that is not below `value`."""
    power = 1
    while power < value:
        power *= 2
    return power


def _fits_without_accumulation(
    question: RecommendRequest, smallest: Configuration, predictors: Predictors
) -> bool:
    """Whether one sample a GPU and step fits: gradients that accumulate may not be sharded."""
    tokens = question.gpus * question.sequence_length
    return question.samples_per_rank > 1 and _fits(
        replace(question, tokens_asked=tokens), smallest, predictors
    )


def _enough_gpus(
    question: RecommendRequest, smallest: Configuration, predictors: Predictors
) -> tuple[int, Configuration] | None:
    """The number of GPUs, doubled, on which it fits with the same tokens per step, and what is predicted
    there; None: there is none."""
    gpus = question.gpus * 2
    while gpus <= min(MOST_GPUS, question.samples):
        sold = question.device.gpus_per_node
        per_node = question.gpus_per_node if question.nodes > 1 else min(gpus, sold)
        joined = joined_by(question.fabric, question.device, gpus)
        larger = replace(
            question, gpus=gpus, gpus_per_node=per_node, fabric=joined, tokens_asked=question.tokens_per_step
        )
        there = _there(larger, smallest, predictors, with_speed=True)
        if there.fits:
            return gpus, there
        gpus *= 2
    return None


def _enough_context(
    question: RecommendRequest, smallest: Configuration, predictors: Predictors
) -> int | None:
    """Among how many GPUs a sample must be divided, all else equal; None: that is not what is too much."""
    degree = 2
    while degree <= MOST_CONTEXT and question.sequence_length // degree >= 2:
        length = question.sequence_length // degree
        shorter = replace(question.with_length(length), tokens_asked=question.samples_asked * length)
        if _fits(shorter, smallest, predictors):
            return degree
        degree *= 2
    return None


def _fits(question: RecommendRequest, like: Configuration, predictors: Predictors) -> bool:
    """Whether the same backend with its options fits another question."""
    return _there(question, like, predictors, with_speed=False).fits


def _there(
    question: RecommendRequest, like: Configuration, predictors: Predictors, *, with_speed: bool
) -> Configuration:
    """It for another question."""
    return best_configuration(
        question, like.label, predictors, checkpointing=like.checkpointing, with_speed=with_speed
    )


def _fits_with(configuration: Configuration) -> str:
    """'zero3 fits at micro-batch 1: 30.1 GB, 2,100 tokens/s per GPU', or 'barely fits'."""
    speed = (
        f", {rate(configuration.tokens_per_second_per_gpu)} tokens/s per GPU" if configuration.speed else ""
    )
    fits = IN_WORDS.get(configuration.verdict.said, configuration.verdict.said)
    size = gigabytes(configuration.needed_bytes)
    return f"{configuration.label} {fits} at micro-batch {configuration.micro_batch_size}: {size} GB{speed}"


def _model_parallel(question: RecommendRequest, smallest: Configuration) -> Iterator[Remedy]:
    """Tensor parallelism within a node divides all of it; pipeline stages what is then still too large."""
    if question.gpus == 1:
        return
    overhead = smallest.needed_bytes - smallest.memory.peak_bytes
    degree = next_power_of_two(smallest.memory.peak_bytes / (smallest.memory_bytes - overhead))
    inside = min(degree, next_power_of_two(question.gpus_per_node / 2 + 0.5))
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


PLAIN = ("fsdp", "zero3")
"""What divides all states, without offload and without ranks that share samples."""
LEAST_LENGTH = 256


def fewer_tokens(question: RecommendRequest, predictors: Predictors) -> Iterator[str]:
    """With how few tokens a plain strategy fits: of a step, or else of a sample, by halving."""
    for label in PLAIN:
        checkpointing = question.checkpointing[-1]
        step, length = question.gpus * question.sequence_length, question.sequence_length
        asked = [
            (
                replace(question, tokens_asked=step),
                "fewer tokens a step",
                f"--tokens-per-step {step}: one sample a GPU",
            )
        ]
        while length // 2 >= LEAST_LENGTH:
            length //= 2
            shorter = question.with_length(length)
            asked.append(
                (shorter, "shorter samples", f"--set data.sequence_length={length}, as many tokens a step")
            )
            asked.append(
                (replace(shorter, tokens_asked=question.gpus * length), "shorter samples, one a GPU",
                 f"--set data.sequence_length={length} --tokens-per-step {question.gpus * length}")
            )  # fmt: skip
        for smaller, what, words in asked:
            if smaller.tokens_per_step > question.tokens_per_step:
                continue  # shared samples are fewer than the GPUs
            with suppress(HarnessError):
                found = best_configuration(smaller, label, predictors, checkpointing=checkpointing)
                if found.fits and not found.verdict.barely_fits:
                    yield f"With {what} ({words}): {_fits_with(found)}"
                    return


GUIDE_GPUS = 512
"""From here on the guide calls pure ZeRO-3 communication-bound."""
EXPOSED_SHARE = 0.2
"""Of a step: above it communication decides the speed."""

Case = Literal[
    "too few samples", "does not fit", "barely fits", "only offload fits", "communication-bound", "slower",
    "mixture of experts",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Why data parallelism alone is the wrong tool, and what would help, the most direct remedy first."""

    case: Case
    figures: str
    remedies: tuple[Remedy, ...]


def advise(
    question: RecommendRequest,
    fitting: Sequence[Configuration],
    too_large: Sequence[Configuration],
    predictors: Predictors,
    shared: Sequence[Configuration] = (),
) -> Advice | None:
    """What else to use; None: data parallelism is the right tool.

    `fitting` is ranked, the best first; `too_large` has what needs least first. `shared`: configurations
    whose ranks share samples, those that fit first and by speed.
    """
    if question.samples_per_rank == 0:
        return _too_few_samples(question, shared)
    on_device = [c for c in fitting if c.offload == "none"]
    with_room = [c for c in shared if c.fits and not c.verdict.barely_fits]
    if on_device and on_device[0].verdict.barely_fits and with_room:
        return _barely(on_device[0], with_room)
    if on_device:
        faster = [c for c in shared if c.fits and _gain(c, on_device[0]) > CLOSE_SHARE]
        if faster:
            return _outrun(on_device[0], faster)
        return _communication_bound(question, on_device[0], tried={tool_of(c) for c in shared})
    without_offload = [c for c in too_large if c.offload == "none"]
    smallest = smallest_need(without_offload or (*too_large, *fitting))
    remedies = tuple(memory_remedies(question, smallest, predictors, shared))
    figures = _needs(smallest)
    if fitting:
        figures = f"without offload none of these fits: {figures}"
        return Advice(case="only offload fits", figures=figures, remedies=remedies)
    return Advice(case="does not fit", figures=figures, remedies=remedies)


def guide_line(question: RecommendRequest, configurations: Sequence[Configuration]) -> str | None:
    """The guide's overlap ratio for full sharding over all ranks; None: it is not predicted."""
    full = next(
        (c for c in configurations if c.scenario.strategy.sharding == "full-shard" and c.speed is not None),
        None,
    )
    if full is None or full.speed is None or full.speed.peak_ratio is None:
        return None
    speed = full.speed
    where = "beyond" if question.gpus > GUIDE_GPUS else "up to"
    return (
        f"full sharding over {question.gpus:,} GPUs ({where} the guide's {GUIDE_GPUS}), {full.label}: "
        f"communication over computing at peak rates {number(speed.peak_ratio)} (above 1 some is exposed "
        f"whatever overlaps), {percent(speed.exposed_seconds / speed.step_seconds)} of the step exposed; "
        f"the guide's own ratio {number(speed.guide_ratio)}"
    )


def _gain(shared: Configuration, plain: Configuration) -> float:
    """By what share of its own rate a configuration is faster than a data-parallel one."""
    rate = shared.tokens_per_second_per_gpu
    return 1 - plain.tokens_per_second_per_gpu / rate if rate and plain.speed else 0.0


def _outrun(plain: Configuration, faster: Sequence[Configuration]) -> Advice:
    """Data parallelism fits, but ranks that share samples are faster."""
    return Advice(
        case="slower",
        figures=f"{plain.label}, the fastest of its kind that fits, is {percent(_gain(faster[0], plain))} "
        f"slower than {faster[0].label}",
        remedies=tuple(predicted_remedies(faster)),
    )


def _barely(plain: Configuration, roomier: Sequence[Configuration]) -> Advice:
    """Data parallelism leaves next to nothing of the device, ranks that share samples more."""
    return Advice(
        case="barely fits",
        figures=f"{plain.label}, the fastest of its kind that fits, leaves "
        f"{percent(plain.margin_bytes / plain.memory_bytes)} of the device free",
        remedies=tuple(predicted_remedies(roomier)),
    )


def _too_few_samples(question: RecommendRequest, shared: Sequence[Configuration]) -> Advice:
    samples = question.samples_asked
    return Advice(
        case="too few samples",
        figures=f"{question.tokens_asked:,} tokens per step are {samples:,} samples of "
        f"{question.sequence_length:,} tokens, fewer than {question.gpus:,} GPUs",
        remedies=(
            *predicted_remedies(shared),
            Remedy(tool="fewer GPUs", degree=samples, reason="data parallelism can use no more"),
            Remedy(
                tool="larger batch",
                degree=None,
                reason=f"at least {question.gpus * question.sequence_length:,} tokens per step",
            ),
        ),
    )


def _needs(smallest: Configuration) -> str:
    groups = smallest.memory_groups()
    checkpointing = ", checkpointing" if smallest.checkpointing else ""
    return (
        f"{smallest.label} at micro-batch {smallest.micro_batch_size}{checkpointing} needs least, "
        f"{gigabytes(smallest.needed_bytes)} GB of {gigabytes(smallest.memory_bytes)}: states "
        f"{gigabytes(groups['states'])}, gathered weights and buffers {gigabytes(groups['gathered'])}, "
        f"activations {gigabytes(groups['activations'])} GB at its {smallest.memory.decisive.name}"
    )


def _communication_bound(
    question: RecommendRequest, best: Configuration, tried: Collection[Tool]
) -> Advice | None:
    """The best configuration on the device still waits for communication."""
    speed = best.speed
    if speed is None or question.gpus == 1:
        return None
    exposed = speed.exposed_seconds / speed.step_seconds
    if exposed <= EXPOSED_SHARE:
        return None
    ratio = speed.communication_seconds / speed.computing_seconds
    figures = (
        f"{percent(exposed)} of the step of {best.label} is exposed communication: it communicates "
        f"{number(speed.communication_seconds)} s and computes "
        f"{number(speed.computing_seconds)} s"
    )
    remedies = tuple(r for r in _faster(question, best, ratio) if r.tool not in tried)
    return Advice(case="communication-bound", figures=figures, remedies=remedies)


def _faster(question: RecommendRequest, best: Configuration, ratio: float) -> list[Remedy]:
    """More tokens between collectives: a larger batch, or fewer data-parallel ranks."""
    each_micro_step = best.scenario.strategy.stage >= 2
    tokens = best.micro_batch_size * question.sequence_length
    tokens *= 1 if each_micro_step else best.accumulation_steps
    per = "micro-step" if each_micro_step else "step"
    found = []
    if ratio > 1:
        needed = round(tokens * ratio)
        reason = (
            f"computing lasts as long as communication at {needed:,} tokens a GPU and {per}, not {tokens:,}"
        )
        found.append(Remedy(tool="larger batch", degree=None, reason=reason))
    degree = min(next_power_of_two(max(ratio, 2.0)), question.gpus_per_node)
    if degree > 1:
        ranks = question.gpus // degree
        reason = (
            f"{ranks:,} data-parallel ranks with {degree} x the tokens each: gradients and weights cross the "
            f"slow links {degree} x less per token"
        )
        found.append(Remedy(tool="tensor", degree=degree, reason=reason))
    if ratio > question.gpus_per_node and question.nodes > 1:
        stages = min(next_power_of_two(ratio / question.gpus_per_node), question.nodes)
        reason = "stages on different nodes send activations between them instead of weights"
        found.append(Remedy(tool="pipeline", degree=stages, reason=reason))
    return found
