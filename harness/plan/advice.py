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
from harness.forms.terms import STATE_KINDS
from harness.judge.wording import percent
from harness.plan.hardware import joined_by
from harness.plan.leading import CLOSE_SHARE, IN_WORDS, rate
from harness.plan.prediction import Prediction, Predictors
from harness.plan.question import Question
from harness.plan.search import Found, best_split, smallest_need
from harness.tell.formats import gigabytes, number

Tool = Literal[
    "more GPUs", "fewer GPUs", "larger batch", "smaller batch", "tensor", "pipeline", "context", "expert",
]  # fmt: skip
Case = Literal[
    "too few samples", "does not fit", "barely fits", "only offload fits", "communication-bound", "slower",
    "mixture of experts",
]  # fmt: skip
MOST_GPUS = 16_384
MOST_CONTEXT = 64
PLAIN = ("fsdp", "zero3")
"""What divides all states, without offload and without ranks that share samples."""
LEAST_LENGTH = 256
GUIDE_GPUS = 512
"""From here on the guide calls pure ZeRO-3 communication-bound."""
EXPOSED_SHARE = 0.2
"""Of a step: above it communication decides the speed."""
OF_SAMPLES = ("activations", "data")
"""Kinds of memory that grow with the tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One way out and the figure that sizes it."""

    tool: Tool
    reason: str
    degree: int | None = None
    """GPUs that share one copy, or the number of GPUs; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Why data parallelism alone is the wrong tool, and what would help, the most direct remedy first."""

    case: Case
    figures: str
    remedies: tuple[Remedy, ...]


def advise(question: Question, found: Found, by: Predictors) -> Advice | None:
    """What else to use; None: data parallelism is the right tool."""
    if question.is_mixture:
        called = "called for; it puts experts on different GPUs, and no strategy here does"
        return Advice(
            case="mixture of experts",
            figures="activations and speed are not predicted: they depend on which tokens go to which expert",
            remedies=(Remedy(tool="expert", reason=called),),
        )
    both = (*found.fitting, *found.too_large)
    shared = [one for one in both if one.planned.mesh.shares_samples]
    fitting = [one for one in found.fitting if one not in shared]
    if question.samples_per_rank == 0:
        return _too_few_samples(question, shared)
    on_device = [one for one in fitting if one.offload == "none"]
    if on_device:
        plain = on_device[0]
        roomier = [one for one in shared if one.is_roomy]
        if plain.barely_fits and roomier:
            free = percent(plain.margin_bytes / plain.there_bytes)
            figures = f"{plain.label}, the fastest of its kind that fits, leaves {free} of the device free"
            return Advice(case="barely fits", figures=figures, remedies=tuple(_predicted(roomier)))
        faster = [one for one in shared if one.fits and _gain(one, plain) > CLOSE_SHARE]
        if faster:
            slower = percent(_gain(faster[0], plain))
            figures = (
                f"{plain.label}, the fastest of its kind that fits: {slower} slower than {faster[0].label}"
            )
            return Advice(case="slower", figures=figures, remedies=tuple(_predicted(faster)))
        return _communication_bound(question, plain, tried={tool_of(one) for one in shared})
    too_large = [one for one in found.too_large if one not in shared]
    smallest = smallest_need([one for one in too_large if one.offload == "none"] or (*too_large, *fitting))
    return Advice(
        case="only offload fits" if fitting else "does not fit",
        figures=_needs(smallest),
        remedies=tuple(_remedies(question, smallest, by, shared)),
    )


def tool_of(one: Prediction) -> Tool:
    """How ranks that share samples do so."""
    if one.planned.strategy.facts.cuts_layers:
        return "pipeline"
    return "tensor" if "tensor" in one.planned.options else "context"


def _predicted(shared: Sequence[Prediction]) -> Iterator[Remedy]:
    """The fastest that fits of each way to share samples; `shared`: all such, fastest first."""
    found: dict[Tool, Prediction] = {}
    for one in shared:
        if one.fits:
            found.setdefault(tool_of(one), one)
    for tool, one in found.items():
        options = one.planned.options
        degree = next(options[name] for name in ("tensor", "sequence", "stages") if options.get(name))
        yield Remedy(tool=tool, degree=int(degree), reason=_fits_with(one))


def _remedies(
    question: Question, smallest: Prediction, by: Predictors, shared: Sequence[Prediction]
) -> Iterator[Remedy]:
    """Ways to make fit what needs least; each is predicted where a prediction can tell.

    `shared`: of ranks that share samples; what is predicted of them replaces lower bounds.
    """

    def there(asked: Question, *, timed: bool = False) -> Prediction:
        return best_split(asked, smallest.label, by, checkpointing=smallest.checkpointing, timed=timed)

    tokens, length = question.gpus * question.sequence_length, question.sequence_length
    if question.samples_per_rank > 1 and there(replace(question, tokens=tokens)).fits:
        reason = f"{smallest.label} fits at {tokens:,} tokens: one sample a GPU, no gradients accumulate"
        yield Remedy(tool="smaller batch", reason=reason)
    gpus = question.gpus * 2
    while gpus <= min(MOST_GPUS, question.samples):
        sold = question.device.gpus_per_node if question.device else question.gpus_per_node
        larger = replace(
            question,
            world_sizes=(gpus,),
            ranks_per_node=question.gpus_per_node if question.nodes > 1 else min(gpus, sold),
            fabric=joined_by(question.fabric, question.device, gpus),
            tokens=question.tokens_per_step,
        )
        if (found := there(larger, timed=True)).fits:
            reason = f"{_fits_with(found)}; each holds less of the states"
            yield Remedy(tool="more GPUs", degree=gpus, reason=reason)
            break
        gpus *= 2
    yield from _predicted(shared)
    if any(one.fits for one in shared):
        return
    tried = {tool_of(one) for one in shared}
    degrees = (2**n for n in range(1, MOST_CONTEXT.bit_length()) if length // 2**n >= 2)
    context = next((n for n in degrees if there(_shorter(question, length // n)).fits), None)
    if context is not None and ("context" not in tried or context > question.gpus_per_node):
        reason = (
            f"each GPU then holds activations of {length // context:,} tokens of a sample: "
            f"fsdp-cp:sequence={context} or ulysses-zero3:sequence={context}"
        )
        yield Remedy(tool="context", degree=context, reason=reason)
    yield from (one for one in _model_parallel(question, smallest) if one.tool not in tried)


def _shorter(question: Question, length: int, tokens: int | None = None) -> Question:
    """The same in samples of so many tokens: as many samples a step, or so many tokens."""
    tokens = tokens or question.samples_asked * length
    return replace(question.of("data", sequence_length=length), tokens=tokens)


def next_power_of_two(value: float) -> int:
    """The smallest power of two that is not below `value`."""
    power = 1
    while power < value:
        power *= 2
    return power


def _fits_with(one: Prediction) -> str:
    """'zero3 fits at micro-batch 1: 30.1 GB, 2,100 tokens/s per GPU', or 'barely fits'."""
    speed = f", {rate(one.tokens_per_second_per_gpu)} tokens/s per GPU" if one.speed else ""
    said, batch = one.verdict.said if one.verdict else "fits", one.planned.micro_batch_size
    needed = gigabytes(one.needed_bytes)
    return f"{one.label} {IN_WORDS.get(said, said)} at micro-batch {batch}: {needed} GB{speed}"


def _model_parallel(question: Question, smallest: Prediction) -> Iterator[Remedy]:
    """Tensor parallelism within a node divides all of it; pipeline stages what is then still too large."""
    memory = smallest.most_memory
    if question.gpus == 1 or memory is None:
        return
    overhead = memory.device_bytes - memory.peak_bytes
    degree = next_power_of_two(memory.peak_bytes / (smallest.there_bytes - overhead))
    inside = min(degree, next_power_of_two(question.gpus_per_node / 2 + 0.5))
    left = gigabytes(memory.peak_bytes / inside)
    reason = f"divides weights, gathered layers and activations within a node: {left} GB a GPU"
    yield Remedy(tool="tensor", degree=inside, reason=reason)
    if degree > inside:
        reason = "stages divide what tensor parallelism leaves too large"
        yield Remedy(tool="pipeline", degree=ceil(degree / inside), reason=reason)


def fewer_tokens(question: Question, by: Predictors) -> Iterator[str]:
    """With how few tokens a plain strategy fits: of a step, or else of a sample, by halving."""
    gpus, length = question.gpus, question.sequence_length
    step = gpus * length
    asked = [(f"--tokens-per-step {step}", "one sample a GPU", replace(question, tokens=step))]
    while length // 2 >= LEAST_LENGTH:
        length //= 2
        option, few = f"--set data.sequence_length={length}", gpus * length
        asked.append((option, "shorter samples", _shorter(question, length, question.tokens_asked)))
        both = f"{option} --tokens-per-step {few}"
        asked.append((both, "shorter samples, one a GPU", _shorter(question, length, few)))
    for label in PLAIN:
        for words, what, smaller in asked:
            if smaller.tokens_per_step > question.tokens_per_step:
                continue  # shared samples are fewer than the GPUs
            with suppress(HarnessError):
                found = best_split(smaller, label, by, checkpointing=question.checkpointing[-1])
                if found.is_roomy:
                    yield f"{words}: {what}: {_fits_with(found)}"
                    return


def guide_line(question: Question, fitting: Sequence[Prediction]) -> str | None:
    """The guide's overlap ratio for full sharding over all ranks; None: it is not predicted."""
    full = (one for one in fitting if one.planned.strategy.sharding == "full-shard" and one.speed is not None)
    one = next((one for one in full if not one.planned.mesh.shares_samples), None)
    if one is None or one.speed is None or one.speed.peak_ratio is None:
        return None
    speed = one.speed
    where = "beyond" if question.gpus > GUIDE_GPUS else "up to"
    return (
        f"full sharding over {question.gpus:,} GPUs ({where} the guide's {GUIDE_GPUS}), {one.label}: "
        f"communication over computing at peak rates {number(speed.peak_ratio)} (above 1 some is exposed "
        f"whatever overlaps), {percent(speed.exposed_seconds / speed.step_seconds)} of the step exposed; "
        f"the guide's own ratio {number(speed.guide_ratio)}"
    )


def _gain(shared: Prediction, plain: Prediction) -> float:
    """By what share of its own rate one is faster than a data-parallel one."""
    own = shared.tokens_per_second_per_gpu
    return 1 - plain.tokens_per_second_per_gpu / own if own and plain.speed else 0.0


def _too_few_samples(question: Question, shared: Sequence[Prediction]) -> Advice:
    samples, length = question.samples_asked, question.sequence_length
    least = f"at least {question.gpus * length:,} tokens per step"
    return Advice(
        case="too few samples",
        figures=f"{question.tokens_asked:,} tokens per step are {samples:,} samples of {length:,} tokens, "
        f"fewer than {question.gpus:,} GPUs",
        remedies=(
            *_predicted(shared),
            Remedy(tool="fewer GPUs", degree=samples, reason="data parallelism can use no more"),
            Remedy(tool="larger batch", reason=least),
        ),
    )


def memory_groups(one: Prediction) -> dict[str, int]:
    """Device bytes of the fullest moment: 'states' that sharding divides, 'activations' that grow with
    the tokens of a sample, and 'gathered' for the rest."""
    assert one.most_memory is not None
    sums, moment = {"states": 0, "gathered": 0, "activations": 0}, one.most_memory.decisive
    for kind, count in moment.kinds.items():
        is_state = kind in STATE_KINDS or moment.name == "optimizer step"
        sums["activations" if kind in OF_SAMPLES else "states" if is_state else "gathered"] += count
    return sums


def _needs(smallest: Prediction) -> str:
    groups = {name: gigabytes(count) for name, count in memory_groups(smallest).items()}
    assert smallest.most_memory is not None
    checkpointing = ", checkpointing" if smallest.checkpointing else ""
    return (
        f"{smallest.label} at micro-batch {smallest.planned.micro_batch_size}{checkpointing} needs least, "
        f"{gigabytes(smallest.needed_bytes)} GB of {gigabytes(smallest.there_bytes)}: states "
        f"{groups['states']}, gathered weights and buffers {groups['gathered']}, activations "
        f"{groups['activations']} GB at its {smallest.most_memory.decisive.name}"
    )


def _communication_bound(question: Question, best: Prediction, tried: Collection[Tool]) -> Advice | None:
    """The best on the device still waits for communication: more tokens between collectives would help, by a
    larger batch or by fewer data-parallel ranks."""
    speed = best.speed
    if speed is None or question.gpus == 1 or speed.exposed_seconds <= EXPOSED_SHARE * speed.step_seconds:
        return None
    ratio = speed.communication_seconds / speed.computing_seconds
    each_micro_step, per_node = best.planned.strategy.stage >= 2, question.gpus_per_node
    tokens = best.planned.micro_batch_size * question.sequence_length
    tokens *= 1 if each_micro_step else best.planned.accumulation_steps
    per = "micro-step" if each_micro_step else "step"
    found: list[Remedy] = []
    if ratio > 1:
        reason = (
            f"computing lasts as long as communication at {round(tokens * ratio):,} tokens a GPU and {per}, "
            f"not {tokens:,}"
        )
        found.append(Remedy(tool="larger batch", reason=reason))
    degree = min(next_power_of_two(max(ratio, 2.0)), per_node)
    if degree > 1:
        reason = (
            f"{question.gpus // degree:,} data-parallel ranks with {degree} x the tokens each: gradients and "
            f"weights cross the slow links {degree} x less per token"
        )
        found.append(Remedy(tool="tensor", degree=degree, reason=reason))
    if ratio > per_node and question.nodes > 1:
        stages = min(next_power_of_two(ratio / per_node), question.nodes)
        reason = "stages on different nodes send activations between them instead of weights"
        found.append(Remedy(tool="pipeline", degree=stages, reason=reason))
    exposed = percent(speed.exposed_seconds / speed.step_seconds)
    return Advice(
        case="communication-bound",
        figures=f"{exposed} of the step of {best.label} is exposed communication: it communicates "
        f"{number(speed.communication_seconds)} s and computes {number(speed.computing_seconds)} s",
        remedies=tuple(one for one in found if one.tool not in tried),
    )
