"""A recommendation for people: the best first, then why not the others, then what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.judge.wording import counted, listed
from harness.plan.alternatives import (
    CHUNKED,
    LORA,
    RELIEFS,
    alternative_lines,
    more_than_least_change,
    nothing_fits,
    reaches_more,
)
from harness.plan.command_words import run_command, set_words
from harness.plan.leading import CLOSE_SHARE, TIE, figures, if_joined, rate
from harness.plan.limits import STATES_SHARE, TIGHT_SHARE, VERDICT_LEGEND
from harness.plan.prediction import Prediction
from harness.plan.recommend.best_variants import accumulated_sharded
from harness.plan.recommend.guide import Remedy
from harness.plan.recommend.of_experts import OfExperts, scenario_in
from harness.plan.recommend.predict import Configuration
from harness.plan.recommend.question import RecommendRequest
from harness.plan.recommend.recommendation import Recommendation
from harness.plan.time.speed import gpu_hours_per_billion_tokens, kilowatt_hours_per_billion_tokens
from harness.tell.formats import NOT_AVAILABLE, fitted, gigabytes, number, percent

PLANNED_WITH = {
    "library-defaults": "each library's own defaults (runtime.preset=library-defaults)",
    "like-for-like": "libraries set alike (runtime.preset=like-for-like)",
}
SHORTLY = {
    "library-defaults": "with the libraries' own defaults",
    "like-for-like": "with libraries set alike",
}
HEADERS = (
    "", "backend", "batch", "accum.", "ckpt", "GB", "free GB", "fit", "host GB", "tokens/s", "MFU", "step s",
    "exposed", "GPU h", "kWh",
)  # fmt: skip
SAME = ("shards like ", "the same strategy through ", "on one GPU the same as ")
"""Begins of why a backend is left out whose strategy another one has."""
NAMED = 4
"""Backends that a reason names."""
MEGABYTE = 10**6
"""Less on the host is counters, not states."""
TOOLS = {
    "more GPUs": "{} GPUs", "fewer GPUs": "{} GPUs at most", "larger batch": "more tokens per step",
    "smaller batch": "fewer tokens per step",
    "tensor": "tensor parallelism over {}", "pipeline": "{} pipeline stages",
    "context": "context parallelism over {}", "expert": "expert parallelism",
}  # fmt: skip


def recommendation_lines(answer: Recommendation) -> Iterator[str]:
    """All that is said, a line each."""
    question = answer.question
    yield from _what_to_use(answer)
    yield _title(question)
    yield from _beside(answer)
    yield from _how_wrong(answer)
    yield from (f"note: {remark}" for remark in question.remarks)
    if answer.best:
        yield ""
        shown = answer.variants.best_by_backend()
        yield table(question, shown, len(answer.best))
        yield (
            "batch: micro-batch; accum.: accumulation; ckpt: activation checkpointing; GB: of a GPU; "
            f"{VERDICT_LEGEND}; host GB: of a node; tokens/s: per GPU; MFU: attention in full, its masked "
            "half too; GPU h, kWh: per billion tokens, kWh at the power limit of the boards"
        )
    if answer.experts:
        yield from ("", _states_table(answer.experts), ROOM)
    rejected = [(one.configuration.label, one.reason) for one in answer.variants.rejected(answer.best)]
    if answer.experts:
        rejected = [(scenario_in(one).label, reason) for one, reason in answer.experts.reasons()]
    if rejected:
        yield ""
        yield "Why not the others"
        yield from (f"- {label}: {reason}" for label, reason in rejected)
    yield from ("", "Not considered", *(f"- {line}" for line in _left_out(answer)), "")
    yield from alternative_lines(answer.instead, lambda one: run_command(one, answer.words))
    yield from _other_parallelism(answer)
    if answer.uncertain:
        yield ""
        yield "Uncertain"
        yield from (f"- {line}" for line in answer.uncertain)
    yield from _next_steps(answer)


def _what_to_use(answer: Recommendation) -> Iterator[str]:
    """The answer in a sentence, what reaches more by another training, and the runner-up."""
    if answer.experts:
        yield from _states_to_use(answer, answer.experts)
        return
    if not answer.best:
        without = "nothing fits" if answer.variants.too_large else "no configuration can be ranked"
        yield (nothing_fits(answer.instead) if answer.variants.too_large else None) or without
        yield from more_than_least_change(answer.instead)
        return
    best, *others = answer.best
    yield f"Use {_in_words(best)}, {SHORTLY[answer.question.preset]}{if_joined(best.scenario)}"
    yield from reaches_more(answer.instead, best.tokens_per_second_per_gpu)
    yield f"Runner-up: {_in_words(others[0])}" if others else f"No runner-up: {_why_alone(answer)}"


def _states_to_use(answer: Recommendation, found: OfExperts) -> Iterator[str]:
    """The same of a mixture of experts: if none leaves room, the way that changes least, and adapters."""
    if not found.roomy:
        yield nothing_fits(answer.instead) or "nothing fits"
        adapted = [one for one in answer.instead if one.fits and one.name in LORA]
        yield from (f"{one.called}: {one.figures}" for one in adapted if one is not answer.instead[0])
        return
    first, *others = found.roomy
    yield f"Use {_states(first)}, {SHORTLY[answer.question.preset]}{if_joined(first.scenario)}"
    yield (f"Runner-up: {_states(others[0])}" if others else "No runner-up: no other leaves room")


def _states(one: Prediction) -> str:
    scenario = scenario_in(one)
    batch = f"micro-batch {scenario.micro_batch_size}, accumulation {scenario.accumulation_steps}"
    return f"{scenario.label}, {batch}: {figures(one)}"


ROOM = (
    "states GB: with weights and gradients that FSDP keeps whole between passes; room: they leave "
    f"{1 - STATES_SHARE:.0%} of the memory for activations"
).replace("%", " %")


def _states_table(found: OfExperts) -> str:
    """States of the usual strategies."""
    rows = []
    for one in found.shown:
        held, there = one.held_beside_activations, one.there_bytes
        room = "yes" if one in found.roomy else "no"
        rows.append([scenario_in(one).label, gigabytes(held), gigabytes(there - held), room])
    headers = ("backend", "states GB", "free GB", "room")
    return fitted(rows, headers, alignments=dict.fromkeys(headers[1:], "right"))


def _why_alone(answer: Recommendation) -> str:
    """Why there is no second."""
    own, variants = answer.best[0].backend, answer.variants
    barely = [c.label for c in variants.best_by_backend() if c.backend != own]
    if barely:
        return f"{listed(barely)} barely {'fits' if len(barely) == 1 else 'fit'}"
    others = any(c.backend != own for c in variants.too_large)
    return "nothing else fits" if others else "no other strategy can run this job"


def _beside(answer: Recommendation) -> Iterator[str]:
    """What speaks for another configuration."""
    if not answer.best:
        if answer.other_best:
            yield f"With runtime.preset={answer.other_preset} fits {_in_words(answer.other_best)}"
        yield from answer.fewer_tokens
        return
    best, with_room = answer.best[0], answer.variants.with_room
    if sharded := accumulated_sharded(answer.variants):
        yield sharded
    if best.is_tight:
        share = percent(1 - TIGHT_SHARE)
        yield (
            f"Close to the limit: less than {share} is free. Nothing that fits leaves more"
            if with_room is None
            else f"Close to the limit: less than {share} is free. Safe alternative: {_in_words(with_room)}"
        )
    if fastest := answer.variants.fastest:
        yield _why_not_fastest(best, fastest)
    if answer.chunked:
        (setting,) = set_words(RELIEFS[CHUNKED])[1:]
        yield f"With a chunked loss ({setting}): {_in_words(answer.chunked)}"
    yield from answer.fewer_tokens
    if answer.other_best is None:
        yield f"With runtime.preset={answer.other_preset} nothing fits"
    elif answer.other_best.label != best.label:
        yield f"With runtime.preset={answer.other_preset} instead: {_in_words(answer.other_best)}"


def _why_not_fastest(best: Configuration, fastest: Configuration) -> str:
    """What the one to take has over a faster one."""
    more = percent(fastest.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1)
    if best.tokens_per_second_per_gpu < (1 - CLOSE_SHARE) * fastest.tokens_per_second_per_gpu:
        why = "whose ranks share samples" if fastest.offload == "none" else "which offloads"
        parts = f"{best.label} has the fewest moving parts of what fits"
        return f"{parts}: {fastest.label}, {why}, is predicted {more} faster"
    leaves_room = best.backend == fastest.backend or (fastest.is_tight and not best.is_tight)
    has = "leaves more room" if leaves_room else "has the fewest moving parts"
    faster = f"{_shortly(fastest)} is predicted {more} faster"
    this = _shortly(best) if best.label == fastest.label else best.label
    return f"{this} {has}: {faster}, {TIE}"


def _shortly(configuration: Configuration) -> str:
    """'fsdp with micro-batch 1 and checkpointing'."""
    checkpointing = " and checkpointing" if configuration.checkpointing else ""
    return f"{configuration.label} with micro-batch {configuration.micro_batch_size}{checkpointing}"


def _how_wrong(answer: Recommendation) -> Iterator[str]:
    if answer.trust is not None:
        yield from answer.trust.lines()


def _in_words(configuration: Configuration) -> str:
    """'fsdp, micro-batch 1, accumulation 64: 75.7 of 85.1 GB, about 3,500 tokens/s a GPU'."""
    checkpointing = ", with checkpointing" if configuration.checkpointing else ""
    return (
        f"{configuration.label}, micro-batch {configuration.micro_batch_size}, accumulation "
        f"{configuration.accumulation_steps}{checkpointing}: {figures(configuration)}"
        + ("" if configuration.speed else f", no speed predicted{_why_untimed(configuration)}")
    )


def _why_untimed(configuration: Configuration) -> str:
    """' (fp8 products are emulated, ...)': what of the reason is said first."""
    reason = (configuration.speed_unknown or "").partition(";")[0]
    return f" ({reason})" if reason else ""


def table(question: RecommendRequest, configurations: Sequence[Configuration], best: int) -> str:
    """The best configuration of each backend; `best` of them are numbered."""
    rows = [
        [str(place) if place <= best else "", *_row(question, configuration)]
        for place, configuration in enumerate(configurations, start=1)
    ]
    return fitted(rows, HEADERS, alignments=dict.fromkeys(HEADERS, "right") | {"backend": "left"})


def _row(question: RecommendRequest, configuration: Configuration) -> list[str]:
    speed, memory = configuration.speed, configuration.memory
    row = [
        configuration.label,
        str(configuration.micro_batch_size),
        str(configuration.accumulation_steps),
        "yes" if configuration.checkpointing else "no",
        configuration.needed_text,
        gigabytes(configuration.margin_bytes),
        configuration.verdict.word,
        gigabytes(memory.host_bytes_per_node if memory.host_bytes_per_node >= MEGABYTE else 0),
    ]
    if speed is None:
        return row + [NOT_AVAILABLE] * 6
    energy = kilowatt_hours_per_billion_tokens(speed, question.gpus)
    return [
        *row,
        rate(speed.tokens_per_second_per_gpu),
        percent(speed.model_flops_utilization),
        number(speed.step_seconds),
        percent(speed.exposed_seconds / speed.step_seconds),
        number(gpu_hours_per_billion_tokens(speed)),
        number(energy),
    ]


def _title(question: RecommendRequest) -> str:
    fabric = f", {question.network.name} between nodes" if question.network and question.nodes > 1 else ""
    return (
        f"{question.model.name} ({_count(question.model.parameters)} parameters) on {question.gpus:,} x "
        f"{question.device.name} ({question.gpus_per_node} a node{fabric}), "
        f"{question.job.training.precision}, {question.tokens_per_step or question.tokens_asked:,} tokens "
        "per step in samples of "
        f"{question.sequence_length:,}, {PLANNED_WITH[question.preset]}"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}e9" if parameters >= 1e6 else f"{parameters:,}"


def _left_out(answer: Recommendation) -> Iterator[str]:
    """A line for each reason."""
    by_reason: dict[str, list[str]] = {}
    same = 0
    for name, reason in answer.variants.left_out.items():
        if reason.startswith(SAME):
            same += 1
        else:
            by_reason.setdefault(reason, []).append(name)
    if same:
        yield f"{counted(same, 'backend')} that shard as others do (--json names them)"
    yield from (f"{listed(names, NAMED)}: {reason}" for reason, names in by_reason.items())


def _other_parallelism(answer: Recommendation) -> Iterator[str]:
    if answer.advice is None:
        yield "Data parallelism is the right tool here: the model fits, and little communication is exposed."
    else:
        fits = {
            "slower": "Data parallelism alone fits, but is slower",
            "barely fits": "Data parallelism alone barely fits",
            "only offload fits": "Data parallelism alone fits with offload only",
            "mixture of experts": "Of a mixture of experts only model states are predicted",
        }
        yield fits.get(answer.advice.case, f"Data parallelism alone is the wrong tool: {answer.advice.case}")
        yield f"- {answer.advice.figures}"
        yield from (f"- {remedy_words(remedy)}: {remedy.reason}" for remedy in answer.advice.remedies)
    if answer.guide is not None:
        yield f"- {answer.guide}"


def remedy_words(remedy: Remedy) -> str:
    """A remedy with its degree."""
    return TOOLS[remedy.tool].format("" if remedy.degree is None else f"{remedy.degree:,}")


def _next_steps(answer: Recommendation) -> Iterator[str]:
    lines = answer.commands
    if lines.compare:
        yield ""
        yield "Measure the best ones on one node"
        yield from (f"  {line}" for line in lines.compare)
    if lines.slurm:
        yield ""
        yield "Measure the best ones under Slurm"
        yield from (f"  {line}" for line in lines.slurm)
