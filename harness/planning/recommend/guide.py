"""Says when data parallelism alone is the wrong tool, and which other parallelism is called for.

The steps are those of the Ultra-Scale Playbook (Nouamane Tazi et al., Hugging Face 2025, 'finding the best
training configuration'): fit the model, reach the global batch, raise throughput. Where the guide names
numbers of GPUs, what they stand for is computed: bytes that do not fit, communication that nothing hides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.judge.wording import percent
from harness.planning.recommend.predict import Configuration, Predictors, smallest_need
from harness.planning.recommend.question import Question
from harness.planning.recommend.ranking import CLOSE_SHARE
from harness.planning.recommend.remedies import (
    Remedy,
    Tool,
    memory_remedies,
    power_of_two,
    predicted_remedies,
    tool_of,
)
from harness.tell.formats import gigabytes, number

GUIDE_GPUS = 512
"""From here on the guide calls pure ZeRO-3 communication-bound."""
EXPOSED_SHARE = 0.2
"""Of a step: above it communication decides the speed."""

Case = Literal[
    "too few samples", "does not fit", "barely fits", "only offload fits", "communication-bound", "slower",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Why data parallelism alone is the wrong tool, and what would help, the most direct remedy first."""

    case: Case
    figures: str
    remedies: tuple[Remedy, ...]


def advise(
    question: Question,
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
    on_device = [c for c in fitting if c.variant.offload == "none"]
    with_room = [c for c in shared if c.fits and not c.verdict.barely_fits]
    if on_device and on_device[0].verdict.barely_fits and with_room:
        return _barely(on_device[0], with_room)
    if on_device:
        faster = [c for c in shared if c.fits and _gain(c, on_device[0]) > CLOSE_SHARE]
        if faster:
            return _outrun(on_device[0], faster)
        return _communication_bound(question, on_device[0], tried={tool_of(c) for c in shared})
    smallest = smallest_need(c for c in too_large if c.variant.offload == "none")
    remedies = tuple(memory_remedies(question, smallest, predictors, shared))
    figures = _needs(smallest)
    if fitting:
        figures = f"without offload nothing fits: {figures}"
        return Advice(case="only offload fits", figures=figures, remedies=remedies)
    return Advice(case="does not fit", figures=figures, remedies=remedies)


def guide_line(question: Question, configurations: Sequence[Configuration]) -> str | None:
    """The guide's overlap ratio for full sharding over all ranks; None: it is not predicted."""
    full = next(
        (c for c in configurations if c.variant.strategy.sharding == "full-shard" and c.speed is not None),
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


def _too_few_samples(question: Question, shared: Sequence[Configuration]) -> Advice:
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


def _communication_bound(question: Question, best: Configuration, tried: Collection[Tool]) -> Advice | None:
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


def _faster(question: Question, best: Configuration, ratio: float) -> list[Remedy]:
    """More tokens between collectives: a larger batch, or fewer data-parallel ranks."""
    each_micro_step = best.variant.strategy.stage >= 2
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
    degree = min(power_of_two(max(ratio, 2.0)), question.gpus_per_node)
    if degree > 1:
        ranks = question.gpus // degree
        reason = (
            f"{ranks:,} data-parallel ranks with {degree} x the tokens each: gradients and weights cross the "
            f"slow links {degree} x less per token"
        )
        found.append(Remedy(tool="tensor", degree=degree, reason=reason))
    if ratio > question.gpus_per_node and question.nodes > 1:
        stages = min(power_of_two(ratio / question.gpus_per_node), question.nodes)
        reason = "stages on different nodes send activations between them instead of weights"
        found.append(Remedy(tool="pipeline", degree=stages, reason=reason))
    return found
