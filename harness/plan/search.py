"""One search: every strategy with its options, micro-batch and checkpointing, ranked; which leads
where predictions cannot tell them apart; why the others lose."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset, World
from harness.backends.mesh import SECOND_COPY
from harness.backends.options import parts_of
from harness.backends.presets import preset_changes
from harness.backends.registry import Entry
from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.forms.families import collectives
from harness.job.job import Job
from harness.judge.wording import percent, ranks
from harness.nested import grouped
from harness.plan.hardware import STATES_SHARE, joined_by
from harness.plan.prediction import P, Prediction, Predictors, predict, with_speed
from harness.plan.question import Question
from harness.plan.scenario import Scenario, why_not_planned
from harness.plan.step_time import SpeedPrediction
from harness.tell.formats import gigabytes

CLOSE_SHARE = 0.05
"""Of the better rate: nearer than that only a measurement ranks."""
TIE = "too little to trust"
"""Of rates that are nearer."""
USUAL = ("ddp", "zero1", "zero2", "zero3", "fsdp-grad-op", "fsdp")
"""The few where nothing says which of them lead."""


def pointless(label: str, gpus: int) -> bool:
    """Whether a strategy that shards has one GPU alone and offloads nothing: the same as one process."""
    return gpus == 1 and label != registry.REFERENCE and not _offloads(label)


def _offloads(label: str) -> bool:
    return registry.moving_parts(label)[0]


def _shares_samples(label: str) -> bool:
    options = registry.parse(label)[1].model_dump()
    return any(name in options for name in ("sequence", "tensor", "stages"))


def by_speed(one: Prediction) -> tuple[bool, float, int]:
    """Sorts the fastest first, and last what barely fits."""
    margin = one.verdict.margin_bytes if one.verdict else 0
    return one.barely_fits, -one.tokens_per_second_per_gpu, -margin


def close_to_first(ranked: Sequence[P]) -> list[P]:
    """Predictions too close to the first to tell apart, itself included. `ranked`: `by_speed`."""
    if not ranked:
        return []
    first = ranked[0]
    least = first.tokens_per_second_per_gpu * (1 - CLOSE_SHARE)
    between = first.speed.tokens_per_second_between if first.speed and first.speed.loses_with_scale else None
    found = []
    for one in (one for one in ranked if one.barely_fits == first.barely_fits):
        strategy = registry.strategy_of(one.label)
        has_replicas = strategy is not None and strategy.facts.has_replicas
        if one.tokens_per_second_per_gpu >= (between[0] if between and has_replicas else least):
            found.append(one)
    return found


def simplest_close(ranked: Sequence[P]) -> P | None:
    """The one to prefer (`preference`) of those that predictions cannot tell from the fastest.

    `ranked`: `by_speed`; of equal ones the first. None: there are none.
    """
    return min(close_to_first(ranked), key=preference, default=None)


def preference(one: Prediction) -> tuple[bool, bool, bool, bool, int]:
    """Sorts those of equal speed: what needs no offload and no shared samples first, of these what leaves
    room for fragmentation and the error of a prediction, of these what is no slower on many GPUs, of these
    what has the fewest moving parts."""
    offloads, place = registry.moving_parts(one.label)
    loses = one.speed is not None and one.speed.is_at_scale
    return offloads, _shares_samples(one.label), one.is_tight, loses, place


def leader(ranked: Sequence[P]) -> P | None:
    """The one to take: `simplest_close` of the first class that there is. `ranked`: `by_speed`; None: none.

    What barely fits comes last. Where ranks with samples of their own fit without offload, neither offload
    nor shared samples lead; if none of those leaves room, shared samples with room are of the same class.
    """
    alone = [
        one for one in ranked if not (one.barely_fits or _shares_samples(one.label) or _offloads(one.label))
    ]
    has_room = not all(one.is_tight for one in alone)

    def later(one: P) -> tuple[bool, bool]:
        shares = _shares_samples(one.label) and (has_room or one.is_tight)
        return one.barely_fits, bool(alone) and (_offloads(one.label) or shares)

    first = min(map(later, ranked), default=None)
    return simplest_close([one for one in ranked if later(one) == first])


def in_order(found: Sequence[P]) -> list[P]:
    """As they are recommended: first `leader`, then each place to `simplest_close` of those that are left."""
    rest = sorted(found, key=by_speed)
    ordered: list[P] = []
    while (first := simplest_close(rest) if ordered else leader(rest)) is not None:
        ordered.append(first)
        rest = [one for one in rest if one is not first]
    return ordered


def _ends(bounds: Sequence[float]) -> list[str]:
    return list(dict.fromkeys(map(gigabytes, bounds)))


def span(bounds: Sequence[float], joined: str = " to ") -> str:
    """'21.7 to 46.9', in GB; bounds that read alike once."""
    return joined.join(_ends(bounds))


def between(bounds: Sequence[float]) -> str:
    """'between 21.7 and 46.9', in GB; bounds that read alike once."""
    return "between " * (len(_ends(bounds)) > 1) + span(bounds, " and ")


def about(rate: float) -> str:
    """Two digits: more are worth nothing."""
    return f"{float(f'{rate:.2g}'):,.0f}" if rate >= 1 else f"{rate:.2g}"


def rate(tokens_per_second: float) -> str:
    """Three digits, by which rows of a table are told apart."""
    return (
        f"{float(f'{tokens_per_second:.3g}'):,.0f}"
        if tokens_per_second >= 100
        else f"{tokens_per_second:.3g}"
    )


def reached(found: Prediction) -> str:
    """'about 2,100', or '1,310 to 2,280', as the table has it, where the speed is a range."""
    between = found.speed.tokens_per_second_between if found.speed else None
    ends = list(dict.fromkeys(map(rate, between or ())))
    return " to ".join(ends) if len(ends) > 1 else f"about {about(found.tokens_per_second_per_gpu)}"


IN_WORDS = {"close": "is close to the limit"}
"""Of a verdict, what is no verb."""
MARKS = {"barely fits": " (barely fits)", "close": " (close to the limit)"}
ON_HOST = 10**9
"""Bytes from which host memory is worth a word."""


def figures(found: Prediction, *, marked: bool = True) -> str:
    """'40.1 of 85.1 GB (close to the limit) and 128 GB of host memory per node, about 1,200 tokens/s a GPU'.

    Speed only of what fits. `marked`: say where it fits only closely.
    """
    verdict, host = found.verdict, found.host_bytes_per_node
    mark = MARKS.get(verdict.said, "") if verdict and marked else ""
    on_host = f" and {host / 1e9:,.0f} GB of host memory per node" if host > ON_HOST else ""
    timed = found.speed if verdict is not None and verdict.fits else None
    speed = f", {reached(found)} tokens/s a GPU" if timed else ""
    if timed and found.scenario and timed.host_update_share >= HOST_UPDATE_SHARE:
        # The host updates once a step, however many tokens that has, so a rate needs their number.
        tokens = round(timed.tokens_per_second_per_gpu * timed.step_seconds * found.scenario.world_size)
        share = percent(timed.host_update_share)
        speed += f" at {tokens:,} tokens a step, of which the host's update takes {share}"
    if not found.needed_between:
        held = f"model states take {gigabytes(found.held_beside_activations)}"
        return f"{held} of {gigabytes(found.there_bytes)} GB{on_host}, activations are not predicted"
    return f"{between(found.needed_between)} of {gigabytes(found.there_bytes)} GB{mark}{on_host}{speed}"


HOST_UPDATE_SHARE = 0.01
"""Of a step, from which the host's update is worth a word."""


def if_joined(scenario: Scenario | None) -> str:
    """', if nodes are joined by NDR400 (--fabric)' where several are and nobody says how; else nothing."""
    if scenario is None or scenario.nodes == 1 or not (scenario.fabric and scenario.fabric.assumed):
        return ""
    return f", if nodes are joined by {scenario.fabric.name} (--fabric)"


NOT_TRIED = {
    "pp:schedule=gpipe": "the bubble of 1f1b, with the activations of all micro-batches",
    "tensor and sequence across nodes": "they communicate in every layer",
    "pipelines of more than 16 stages": "not tried",
    "offload where ranks share samples": "not tried",
    "tensor, sequence and pipeline at once": "combined by no backend",
}
"""Further ways to divide a model, and why they are left out."""
EXPERTS = "expert parallelism"
OF_EXPERTS = "of a mixture of experts the usual strategies alone are compared"
MOST_STAGES = 4
"""Powers of two that are tried: 2 to 16 stages."""
SHARDING_ALL = ("fsdp", "zero3")
"""What divides all states over all ranks."""
GROUPS_OF_NODES = (1, 2, 4)
"""Shard groups of hybrid strategies, in nodes; on one node half of its ranks."""
SPEEDS = 2
"""Micro-batches from the largest downwards whose speed is predicted; the fastest is kept."""
SMALL_SHARE = 0.02
"""Of a step: a smaller part explains nothing."""


def distinct_backends(gpus: int | None = None) -> tuple[list[Entry], dict[str, str]]:
    """Built-in backends that shard differently, and why each of the others is left out, by name.

    `gpus`: where they run; None: on several. One takes no library that only averages gradients.
    Of two libraries with one strategy both stay, since they differ in memory and speed; FSDP2 stands for
    FSDP1 where it has the strategy, and DDP for everything that shards nothing.
    """
    chosen: dict[object, Entry] = {}
    left_out: dict[str, str] = {}
    order = sorted(registry.BUILT_IN.values(), key=lambda entry: entry.strategy.family == "fsdp1")  # type: ignore[union-attr]
    for entry in order:
        strategy = entry.strategy
        assert strategy is not None
        if strategy.sharding == "single" and gpus != 1:
            left_out[entry.name] = "one process"
        elif gpus == 1 and strategy.stage == 0 and strategy.sharding != "single":
            left_out[entry.name] = f"on one GPU the same as {registry.REFERENCE}"
        elif strategy.through_accelerate:
            library = "Trainer" if strategy.route == "trainer" else "Accelerate"
            left_out[entry.name] = f"the same strategy through {library}"
        elif strategy.multiplies_gradients:
            left_out[entry.name] = (
                "gradients too large by the number of ranks that share a sample, unless corrected"
            )
        elif (key := _kind(strategy)) in chosen:
            left_out[entry.name] = f"shards like {chosen[key].name}"
        else:
            chosen[key] = entry
    return list(chosen.values()), left_out


def offloads(entry: Entry, job: Job) -> list[dict[str, str]]:
    """Options of each offload of a backend that differs and whose speed is known, the first without.

    DeepSpeed updates what it offloads by its own Adam where the job's is AdamW, as it does by itself.
    """
    fields = entry.options_class().model_fields
    offered = (
        [str(value) for value in get_args(fields["offload"].annotation)] if "offload" in fields else ["none"]
    )
    strategy, optimizer = entry.strategy, job.optimizer
    if strategy is not None and strategy.zero_stage in (1, 2):  # DeepSpeed keeps weights on the device
        offered.remove("cpu")
    is_plain = optimizer.kind == "adamw" and optimizer.implementation == "default"
    own = {"adam": "deepspeed"} if "adam" in fields and is_plain else {}
    return [{} if value == "none" else {**own, "offload": value} for value in offered]


def _kind(strategy: StrategyKind) -> object:
    """Equal for backends of which one is enough."""
    if strategy.sequence is not None or strategy.cuts_model:
        return (strategy.family, strategy.sequence, strategy.zero_stage)
    return strategy.sharding if strategy.stage == 0 else (strategy.sharding, strategy.zero_stage)


OPTION = "sync_each_batch"
"""A loop without `no_sync()` or, of FSDP2, `set_requires_gradient_sync(False)`; sync_each_batch=True of
Accelerate's GradientAccumulationPlugin."""


def reducing_each(label: str) -> str | None:
    """The label of the same strategy that reduces in every micro-step, so that no whole gradients add up;
    None: FSDP has no such option there, or takes it already."""
    entry, options = registry.parse(label)
    strategy, given = entry.strategy, options.model_dump()
    if strategy is None or strategy.stage < 2 or given.get(OPTION) is not False:
        return None
    return registry.label_with(label, **{OPTION: "true"})


def variants(entry: Entry, gpus: int, gpus_per_node: int, job: Job) -> Iterator[str]:
    """Labels of a backend with each of its offloads, degrees and groups of ranks that the world allows.

    A second copy of the weights is tried within a node only, where nobody shares samples: what crosses its
    links is gathered once.
    """
    strategy, fields = entry.strategy, entry.options_class().model_fields
    assert strategy is not None
    groups: list[int | None] = [None]
    if strategy.facts.has_replicas:  # at least two replicas of at least two shards
        several = gpus > gpus_per_node
        sizes = [gpus_per_node * nodes for nodes in GROUPS_OF_NODES] if several else [gpus // 2]
        groups = [size for size in sizes if size > 1 and gpus % size == 0 and gpus // size > 1]
    for size in groups:
        for offload in offloads(entry, job):
            for degrees in _degrees(fields, gpus, gpus_per_node, bool(offload)):
                label = _variant(entry, shard_size=size, **offload, **degrees)
                if not pointless(label, gpus):
                    yield label
    whole_nodes = gpus > gpus_per_node and gpus % gpus_per_node == 0
    if whole_nodes and not registry.mesh_of(entry.name, gpus).shares_samples:
        for option in SECOND_COPY:
            if option in fields:
                yield _variant(entry, **{option: gpus_per_node})


def _variant(entry: Entry, **given: str | int | None) -> str:
    text = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return registry.canonical_label(f"{entry.name}:{text}" if text else entry.name)


def _degrees(
    fields: Collection[str], gpus: int, gpus_per_node: int, is_offloaded: bool
) -> list[dict[str, Any]]:
    """Options that say how many ranks divide layers, samples or blocks; one empty set where none do.

    What crosses in every layer stays within a node. Pipelines: 1F1B with as many micro-batches as stages and
    with four times as many; interleaved with as many.
    """
    powers = [2**n for n in range(1, 11) if 2**n <= gpus and gpus % 2**n == 0]
    if "micro_batches" in fields:
        found: list[dict[str, Any]] = []
        for stages in powers[:MOST_STAGES]:
            few = {"stages": stages, "micro_batches": stages}
            found += [few, few | {"micro_batches": 4 * stages}, {"schedule": "interleaved", **few}]
        return found
    for name in ("tensor", "sequence"):
        if name in fields:
            inside = [size for size in divisors(min(gpus, gpus_per_node))[1:] if gpus % size == 0]
            return [] if is_offloaded else [{name: size} for size in inside]
    return [{}]


def scenario_of(
    question: Question, label: str, micro_batch_size: int, *, checkpointing: bool | str
) -> Scenario:
    """The scenario of a search in which all that was open is decided."""
    training = question.job.training.model_copy(update={"activation_checkpointing": checkpointing})
    scenario = question.scenario(
        label,
        question.job.model_copy(update={"training": training}),
        question.gpus,
        micro_batch_size=micro_batch_size,
        accumulation_steps=max(1, samples_of(question, label) // micro_batch_size),
    )
    assert scenario is not None  # variants are built-in
    return scenario


def samples_of(question: Question, label: str) -> int:
    """Samples per step of each rank, or group of ranks, that has samples of its own."""
    return question.samples // registry.mesh_of(label, question.gpus).data_size


def divisors(number: int, parts: int = 1) -> list[int]:
    """All divisors that are multiples of `parts`, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return sorted(size for size in {*small, *(number // part for part in small)} if size % parts == 0)


def micro_batch_sizes(question: Question, label: str) -> list[int]:
    """Micro-batches that a run of the harness takes: they divide the samples of a rank or of a group.

    Raises HarnessError where the samples do not divide over those, or make no whole micro-batches of a
    pipeline.
    """
    data_ranks = registry.mesh_of(label, question.gpus).data_size
    if question.samples % data_ranks:
        raise HarnessError(f"{question.samples:,} samples do not divide over its {data_ranks:,} data ranks")
    parts = parts_of(registry.parse(label)[1], question.gpus)
    sizes = divisors(samples_of(question, label), parts)
    if not sizes:
        raise HarnessError("its micro-batches do not divide the samples of a pipeline")
    return sizes


def largest_predicted(
    sizes: Sequence[int], fits: Callable[[int], bool], likely: Collection[int] = ()
) -> int | None:
    """The largest of `sizes` that a prediction lets fit, by halving; None: not even the first.

    The last is asked first: as it leaves no accumulation, it may need less than smaller ones. likely:
    larger ones than the largest of these that fits are looked for.
    """
    if fits(sizes[-1]):
        return sizes[-1]
    first = next((sizes.index(size) for size in sorted(likely, reverse=True) if fits(size)), 0)
    if not fits(sizes[first]):
        return None
    index = bisect_left(range(first, len(sizes)), True, key=lambda position: not fits(sizes[position]))
    return sizes[first + index - 1]


def smallest_need(found: Iterable[Prediction]) -> Prediction:
    """What needs least memory."""
    return min(found, key=lambda one: one.needed_bytes)


def near_largest(
    question: Question,
    label: str,
    by: Predictors,
    *,
    checkpointing: bool | str,
    likely: Collection[int] = (),
) -> list[Prediction]:
    """Splits of the global batch that fit, from the largest micro-batch down; if none does, what needs least.

    The largest micro-batch by halving, since memory grows with it, from `likely` on; then the speed of it,
    of the next smaller ones that fit, and of the largest that leaves room. Raises HarnessError where neither
    the memory nor bounds of it are known.
    """
    assert question.device is not None
    sizes, there = micro_batch_sizes(question, label), question.device.memory_bytes

    @cache
    def scenario(size: int) -> Scenario:
        return scenario_of(question, label, size, checkpointing=checkpointing)

    @cache
    def predicted(size: int) -> Prediction:
        found = predict(scenario(size), by, timed=False)
        if found.most_memory is None:
            raise HarnessError(str(found.memory_unknown))
        return found

    @cache
    def least(size: int) -> int:
        return by.least(scenario(size))

    largest = largest_predicted(sizes, lambda size: least(size) <= there and predicted(size).fits, likely)
    if largest is None:
        smallest = predicted(sizes[0])
        if least(sizes[-1]) >= smallest.needed_bytes:
            return [smallest]
        return [smallest_need((smallest, predicted(sizes[-1])))]
    smaller = [size for size in reversed(sizes) if size <= largest]
    roomy = next((size for size in smaller if predicted(size).leaves_room), largest)
    near = [predicted(size) for size in dict.fromkeys((*smaller[:SPEEDS], roomy))]
    return [with_speed(one, by) for one in near if one.fits]


Choices = Mapping[str, list[Prediction]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Every variant's best split: the one to take, then by speed those that fit, then the others."""

    fitting: tuple[Prediction, ...] = ()
    """First the one to take (`leader`); last what barely fits."""
    too_large: tuple[Prediction, ...] = ()
    """With the smallest micro-batch, and checkpointing if it may be chosen; nearest to fitting first."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Backends that were not looked at, and why."""
    fastest: Prediction | None = None
    """The fastest that does not barely fit, if that is not the one to take."""
    with_room: Prediction | None = None
    """The one to take of those that are not tight, whichever micro-batch and checkpointing that takes."""
    choices: Choices = field(default_factory=dict)
    """By label, what was predicted of it."""

    def best_by_backend(self) -> tuple[Prediction, ...]:
        """The best of each backend that fits, in the order in which they are recommended."""
        by_backend = grouped((one.backend, one) for one in self.fitting)
        if not self.fitting or self.fitting[0].most_memory is None:  # states alone: by moving parts already
            return self.fitting
        first = self.fitting[0]
        others = [
            simplest_close(sorted(found, key=by_speed))
            for backend, found in by_backend.items()
            if backend != first.backend
        ]
        return (first, *in_order([one for one in others if one]))

    def best(self, most: int = 3) -> tuple[Prediction, ...]:
        """The few to measure; what barely fits only where nothing else fits."""
        fitting = self.best_by_backend()
        return (tuple(one for one in fitting if not one.barely_fits) or fitting)[:most]

    def rejected(self, best: Sequence[Prediction]) -> list[tuple[Prediction, str]]:
        """Each backend that is not among the best: its fastest split, or what it lacks to fit, and why."""
        chosen = {one.backend for one in best}
        slower = [one for one in self.best_by_backend() if one.backend not in chosen]
        fit = chosen | {one.backend for one in slower}
        nearest: dict[str, Prediction] = {}
        for one in self.too_large:
            if one.backend not in fit:
                nearest.setdefault(one.backend, one)
        reasons = [(one, why_slower(one, self.fitting[0], self.choices.get(one.label, ()))) for one in slower]
        return reasons + [(one, why_too_large(one)) for one in nearest.values()]


def search(
    question: Question, by: Predictors, known: Choices | None = None, *, only: Collection[str] | None = None
) -> Found:
    """Predict every variant with and without checkpointing and rank the best split of each.

    known: `choices` of another preset. `only`: labels to predict; None: all. Of a mixture of experts the
    states of the usual strategies.
    """
    backends, left_out = distinct_backends(question.gpus)
    if question.is_mixture:
        return _of_states(question, backends, left_out, only)
    if not question.names_all:
        named = {registry.parse(label)[0].name for label in question.labels}
        backends, left_out = [registry.BUILT_IN[name] for name in sorted(named)], {}
    tried = _tried(question, backends if question.samples else [], left_out, only)
    left_out |= NOT_TRIED
    every: dict[str, list[Prediction]] = {}
    known, made = known or {}, dict[str, list[Prediction]]()
    for label in tried:  # which grows
        try:
            before = known.get(label, ())
            is_known = before and not _has_preset(question, label)
            choices = list(before) if is_known else _choices(question, label, by, before)
            made[label] = choices
            every[label] = [one for one in choices if one.fits] or [smallest_need(choices)]
            roomy = any(one.leaves_room for one in choices)
            if not roomy and samples_of(question, label) > 1:  # shards of gradients may fit, not whole ones
                each = reducing_each(label)
                if each is not None and _why_not_tried(question, each) is None:
                    tried.append(each)
        except Exception as error:  # one that cannot be predicted must not cost the others
            reason = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
            left_out[label] = f"no prediction: {reason}"
    choices = sorted((one for of_label in every.values() for one in of_label if one.fits), key=by_speed)
    first = leader(choices)
    shown = [
        first if first in of_label else simplest_close(sorted(of_label, key=by_speed)) or of_label[0]
        for of_label in every.values()
    ]
    fitting = sorted((one for one in shown if one and one.fits and one is not first), key=by_speed)
    too_large = sorted((one for one in shown if one and not one.fits), key=lambda one: one.needed_bytes)
    is_slower = first and first.tokens_per_second_per_gpu < choices[0].tokens_per_second_per_gpu
    return Found(
        fitting=(*([first] if first else []), *fitting),
        too_large=tuple(too_large),
        left_out=left_out,
        fastest=choices[0] if is_slower else None,
        with_room=leader([one for one in choices if not one.is_tight]),
        choices=made,
    )


def _of_states(
    question: Question, backends: Sequence[Entry], left_out: dict[str, str], only: Collection[str] | None
) -> Found:
    """The usual strategies at micro-batches of one sample: the fewest moving parts first, else least held."""
    labels = only or (USUAL if question.gpus > 1 else (registry.REFERENCE, *USUAL))
    found = [
        Prediction(scenario=scenario_of(question, label, 1, checkpointing=question.checkpointing[0]))
        for label in labels
        if not pointless(label, question.gpus)
    ]
    shown = {one.label for one in found}
    left_out |= {entry.name: OF_EXPERTS for entry in backends if entry.name not in shown}
    left_out[EXPERTS] = "called for, but no backend has it"
    roomy = sorted((one for one in found if one.fits), key=lambda one: registry.moving_parts(one.label))
    others = sorted((one for one in found if not one.fits), key=lambda one: one.held_beside_activations)
    return Found(fitting=tuple(roomy), too_large=tuple(others), left_out=left_out)


def _has_preset(question: Question, label: str) -> bool:
    """Whether one of the presets changes a setting of the strategy."""
    strategy, precision = registry.strategy_of(label), question.job.training.held_precision
    assert strategy is not None
    return any(preset_changes(strategy, precision, p, question.model.parameters) for p in get_args(Preset))


def _tried(
    question: Question,
    backends: Sequence[Entry],
    left_out: dict[str, str],
    only: Collection[str] | None,
) -> list[str]:
    """Every variant that can run the job; why the others cannot goes to `left_out`."""
    found = []
    for entry in backends:
        of_entry = list(variants(entry, question.gpus, question.gpus_per_node, question.job))
        if not question.names_all and entry.name not in question.labels:  # with options
            of_entry = [label for label in question.labels if registry.parse(label)[0] is entry]
        if not of_entry:
            left_out[entry.name] = f"its groups cannot be made of {ranks(question.gpus)}"
        for label in (one for one in of_entry if only is None or one in only):
            if (reason := _why_not_tried(question, label)) is not None:
                left_out[label] = reason
                continue
            found.append(label)
    return found


def _why_not_tried(question: Question, label: str) -> str | None:
    try:
        size = micro_batch_sizes(question, label)[0]
    except HarnessError as error:
        return str(error)
    world = World.planned(question.gpus, question.gpus_per_node, "cuda")
    return why_not_planned(label, question.job, world, size, question.model)


def _choices(
    question: Question, label: str, by: Predictors, before: Sequence[Prediction]
) -> list[Prediction]:
    """Without checkpointing and with it, those that fit; what needs least where none does.

    before: the same of another preset, near which they are looked for. Raises HarnessError where neither has
    a prediction.
    """
    choices: list[Prediction] = []
    unknown: HarnessError | None = None
    likely: set[int] = set()  # what fits without checkpointing fits with it
    for checkpointing in question.checkpointing:
        likely |= {
            one.planned.micro_batch_size for one in before if one.fits and one.checkpointing == checkpointing
        }
        try:
            near = near_largest(question, label, by, checkpointing=checkpointing, likely=likely)
        except HarnessError as error:
            unknown = error
            continue
        choices += near
        largest = near[0].planned
        likely = {largest.micro_batch_size} if near[0].fits else set()
        if any(one.leaves_room for one in near) and largest.accumulation_steps == 1:
            break  # recomputation would make no larger micro-batch fit
    if unknown and not choices:
        raise unknown
    return choices


def fewest_gpus(question: Question, by: Predictors) -> Prediction | None:
    """Full sharding, or one process, on the fewest GPUs on which it fits with room, halved from those asked
    for at the same tokens of a step; None: not on those asked for, or no such strategy was named."""
    found: Prediction | None = None
    gpus, alone = question.gpus, question.names_all or registry.REFERENCE in question.labels
    kinds = {
        one: (s := registry.parse(one)[0].strategy) and _kind(s) for one in (*SHARDING_ALL, *question.labels)
    }
    full = [kinds[name] for name in SHARDING_ALL]
    named = [one for one in (SHARDING_ALL if question.names_all else question.labels) if kinds[one] in full]
    sharding = (*named, *filter(None, map(reducing_each, named)))
    while gpus and not question.samples % gpus:
        asked = replace(
            question, world_sizes=(gpus,), fabric=joined_by(question.fabric, question.device, gpus)
        )
        roomy = None
        for label in sharding if gpus > 1 else (registry.REFERENCE,) * alone:
            if roomy is None and _why_not_tried(asked, label) is None:
                with suppress(HarnessError):
                    near = near_largest(asked, label, by, checkpointing=question.checkpointing[-1])
                    roomy = next((one for one in near if one.leaves_room), None)
        if roomy is None:
            break
        found, gpus = roomy, gpus // 2 if gpus % 2 == 0 else 0
    return found


def textbook_because(one: Prediction) -> str | None:
    """Why its speed rests on the papers' count of bytes, not on the library's; None: it does not."""
    return collectives(one.planned.workload()).unknown if one.speed else None


def why_too_large(one: Prediction) -> str:
    """What is missing, at which moment, and the largest part of it; of states alone how much they take."""
    there = gigabytes(one.there_bytes)
    if one.most_memory is None:
        held = one.held_beside_activations
        text = f"model states take {gigabytes(held)} of {there} GB"
        if held > one.there_bytes:
            return f"does not fit: {text}"
        return f"{text}, and above {percent(STATES_SHARE)} activations have little room"
    moment, scenario = one.most_memory.decisive, one.planned
    how = f"micro-batch {scenario.micro_batch_size}{', checkpointing' if one.checkpointing else ''}"
    if one.verdict is None:
        needed = span([bound.device_bytes for bound in one.memory_bounds or ()])
        return f"may not fit: {needed} of {there} GB at {how}"
    kinds = moment.kinds
    largest = max(kinds, key=lambda kind: kinds[kind], default=None)
    part = f"; largest part {largest} {gigabytes(kinds[largest])} GB" if largest else ""
    if scenario.accumulation_steps == 1 and scenario.micro_batch_size > 1:
        part += "; a smaller micro-batch needs more, since gradients that accumulate are not sharded"
    return (
        f"does not fit: {gigabytes(one.needed_bytes)} GB of {there} ({gigabytes(-one.margin_bytes)} GB too "
        f"much) at {how}, {moment.name}{part}"
    )


def exposed_share(speed: SpeedPrediction, step: str = "the step") -> str:
    """'3.7 % of the step is exposed communication'; where the step is a range, at which end or rate."""
    share = percent(speed.exposed_seconds / speed.step_seconds)
    least = "at least " if speed.loses_with_scale else ""
    rate = "" if speed.step_seconds_between is None or least else ", at the assumed matmul rate,"
    return f"{least}{share} of {step}{rate} is exposed communication"


def why_slower(one: Prediction, best: Prediction, choices: Sequence[Prediction] = ()) -> str:
    """How much slower it is than the best, and what of the step explains most of that.

    choices: other splits of it.
    """
    if one.most_memory is None:
        return "has more moving parts"
    if one.speed is None or best.speed is None:
        return f"no speed predicted: {one.speed_unknown or best.speed_unknown or 'unknown'}"
    if one.barely_fits:
        return f"barely fits: {percent(one.margin_bytes / one.there_bytes)} of the device is free"
    slower = 1 - one.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu
    if slower <= 0:
        price = "less room" if one.is_tight and not best.is_tight else "more moving parts"
        return f"faster by {percent(-slower)}{f', {TIE}' * (-slower <= CLOSE_SHARE)}, with {price}"
    speed, step, reasons = one.speed, one.speed.step_seconds, []
    exposed = (speed.exposed_seconds - best.speed.exposed_seconds) / step
    if exposed > SMALL_SHARE:
        longest = max(speed.communication, key=lambda term: term.seconds)
        reasons.append((exposed, f"{exposed_share(speed)}, most of it {longest.name}"))
    computing = (speed.computing_seconds - best.speed.computing_seconds) / step
    if computing > SMALL_SHARE:
        reasons.append((computing, _more_computing(one, best, choices)))
    text = "; ".join(reason for _, reason in sorted(reasons, reverse=True))
    return f"slower by {percent(slower)}" + (f": {text}" if text else f", {TIE}")


def _more_computing(one: Prediction, best: Prediction, choices: Sequence[Prediction]) -> str:
    """Why it computes longer than the best."""
    assert one.speed is not None
    assert best.speed is not None
    if one.offload not in ("none", best.offload):
        return f"offload={one.offload} updates on the host and copies to and from it"
    size, fitting = one.planned.micro_batch_size, [other for other in choices if other.fits]
    if one.checkpointing and not best.checkpointing:
        without = [other for other in fitting if not other.checkpointing]
        largest = max((o.planned.micro_batch_size for o in without if not o.barely_fits), default=size)
        if largest < size:
            return f"recomputes activations for micro-batch {size} (without: {largest})"
        return f"recomputes activations to {'leave room' if without else 'fit'}"
    if size < best.planned.micro_batch_size and all(o.planned.micro_batch_size <= size for o in fitting):
        return f"only micro-batch {size} fits, which computes less efficiently"
    own, others = one.speed.computing, {term.name: term.seconds for term in best.speed.computing}
    most = max(own, key=lambda term: term.seconds - others.get(term.name, 0.0))
    return f"'{most.name}' takes longer"
