"""Ranks what fits by speed, and says why each of the others loses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from harness.backends import registry
from harness.backends.base import Preset, World
from harness.backends.entry import Entry
from harness.backends.presets import preset_changes
from harness.errors import HarnessError
from harness.judge.wording import percent
from harness.plan.accumulation import HOW, OPTION, reducing_each
from harness.plan.leading import TIE, by_speed, distinct_backends, in_order, leader, simplest_close
from harness.plan.prediction import Predictors
from harness.plan.recommend.predict import (
    NOT_TRIED,
    Configuration,
    micro_batch_sizes,
    near_largest,
    samples_of,
    scenario_of,
    smallest_need,
    variants,
)
from harness.plan.recommend.question import RecommendRequest
from harness.plan.scenario import why_not_planned
from harness.tell.formats import gigabytes

SMALL_SHARE = 0.02
"""Of a step: a smaller part explains nothing."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A backend with its options that is not among the best, and why."""

    configuration: Configuration
    reason: str


Choices = Mapping[str, list[Configuration]]


@dataclass(frozen=True, kw_only=True)
class BestVariants:
    """Every variant's best configuration: the one to take, then by speed those that fit, then the others."""

    fitting: tuple[Configuration, ...]
    """First the one to take (`leader`); last what barely fits."""
    too_large: tuple[Configuration, ...]
    """With the smallest micro-batch, and checkpointing if it may be chosen; nearest to fitting first."""
    left_out: dict[str, str]
    """Backends that were not looked at, and why."""
    fastest: Configuration | None = None
    """The fastest that does not barely fit, if that is not the one to take."""
    with_room: Configuration | None = None
    """The one to take of those that are not tight, whichever micro-batch and checkpointing that takes."""
    choices: Choices = field(default_factory=dict)
    """By label, what was predicted of it."""

    def best_by_backend(self) -> tuple[Configuration, ...]:
        """The best configuration of each backend that fits, in the order in which they are recommended."""
        variants: dict[str, list[Configuration]] = {}
        for configuration in self.fitting:
            variants.setdefault(configuration.backend, []).append(configuration)
        leading = self.fitting[:1]
        others = [
            simplest_close(sorted(found, key=by_speed))
            for backend, found in variants.items()
            if backend != leading[0].backend
        ]
        return (*leading, *in_order([c for c in others if c]))

    def rejected(self, best: Sequence[Configuration]) -> list[Rejected]:
        """Each backend that is not among the best, with its fastest configuration or what it lacks to fit."""
        chosen = {configuration.backend for configuration in best}
        slower = [c for c in self.best_by_backend() if c.backend not in chosen]
        fit = chosen | {c.backend for c in slower}
        nearest: dict[str, Configuration] = {}
        for configuration in self.too_large:
            if configuration.backend not in fit:
                nearest.setdefault(configuration.backend, configuration)
        reasons = [(c, why_slower(c, self.fitting[0])) for c in slower]
        reasons += [(c, why_too_large(c)) for c in nearest.values()]
        return [Rejected(configuration=configuration, reason=reason) for configuration, reason in reasons]


def best_variants(
    question: RecommendRequest,
    predictors: Predictors,
    known: Choices | None = None,
    *,
    only: Collection[str] | None = None,
) -> BestVariants:
    """Predict every variant with and without checkpointing and rank the best configuration of each.

    known: `choices` of another preset. `only`: labels to predict; None: all.
    """
    backends, left_out = distinct_backends(question.gpus)
    tried = _tried(question, backends if question.samples else [], left_out, predictors, only)
    left_out |= NOT_TRIED
    every: dict[str, list[Configuration]] = {}
    known, made = known or {}, dict[str, list[Configuration]]()
    for label in tried:  # which grows
        try:
            before = known.get(label, ())
            is_known = before and not _has_preset(question, label)
            choices = list(before) if is_known else _choices(question, label, predictors, before)
            made[label] = choices
            every[label] = [c for c in choices if c.fits] or [smallest_need(choices)]
            each = reducing_each(label) if _accumulates_too_much(question, choices) else None
            if each is not None and _why_not_tried(question, each) is None:
                tried.append(each)
        except Exception as error:  # one that cannot be predicted must not cost the others
            reason = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
            left_out[label] = f"no prediction: {reason}"
    choices = sorted((c for of_label in every.values() for c in of_label if c.fits), key=by_speed)
    first = leader(choices)
    found = [_of_label(of_label, first) for of_label in every.values()]
    fitting = sorted((c for c in found if c.fits), key=by_speed)
    too_large = sorted((c for c in found if not c.fits), key=lambda c: c.needed_bytes)
    return BestVariants(
        fitting=tuple(c for c in (first, *(c for c in fitting if c is not first)) if c),
        too_large=tuple(too_large),
        left_out=left_out,
        fastest=choices[0] if first and _is_faster(choices[0], first) else None,
        with_room=leader([c for c in choices if not c.is_tight]),
        choices=made,
    )


def _of_label(choices: Sequence[Configuration], first: Configuration | None) -> Configuration:
    """The choice of a variant to show: the one to take if it is among them."""
    if first is not None and first in choices:
        return first
    return simplest_close(sorted(choices, key=by_speed)) or choices[0]


def _is_faster(one: Configuration, other: Configuration) -> bool:
    return one.tokens_per_second_per_gpu > other.tokens_per_second_per_gpu


def _accumulates_too_much(question: RecommendRequest, choices: Sequence[Configuration]) -> bool:
    """Whether a step could be cut into micro-steps, and no way to cut it leaves room: shards of gradients in
    place of whole ones may."""
    roomy = any(c.verdict.leaves_room for c in choices if c.fits)
    return not roomy and samples_of(question, choices[0].label) > 1


def accumulated_sharded(variants: BestVariants) -> str | None:
    """What the option of the one to take is for; None: it does not reduce in every micro-step."""
    first = variants.fitting[0]
    if not first.scenario.options.get(OPTION) or first.accumulation_steps == 1:
        return None
    how = HOW[first.scenario.strategy.family]
    return (
        f"{OPTION}: gradients are reduced in each of the {first.accumulation_steps:,} micro-steps ({how}); "
        "whole ones that add up between micro-steps do not fit, or leave no room"
    )


def _has_preset(question: RecommendRequest, label: str) -> bool:
    """Whether one of the presets changes a setting of the strategy."""
    strategy, precision = registry.strategy_of(label), question.job.training.held_precision
    assert strategy is not None
    return any(preset_changes(strategy, precision, p, question.model.parameters) for p in get_args(Preset))


def _tried(
    question: RecommendRequest,
    backends: Sequence[Entry],
    left_out: dict[str, str],
    predictors: Predictors,
    only: Collection[str] | None,
) -> list[str]:
    """Every variant that can run the job; why the others cannot goes to `left_out`.

    Profiles of divided models that are not there yet are traced together.
    """
    found, scenarios = [], []
    for entry in backends:
        if not (of_entry := list(variants(entry, question.gpus, question.gpus_per_node, question.job))):
            left_out[entry.name] = f"{question.gpus} GPUs do not make its groups"
        for label in (one for one in of_entry if only is None or one in only):
            reason = _why_not_tried(question, label)
            if reason is not None:
                left_out[label] = reason
                continue
            found.append(label)
            scenarios += [
                scenario_of(question, label, size, checkpointing=checkpointing)
                for checkpointing in question.checkpointing
                for size in micro_batch_sizes(question, label)[:2]
            ]
    predictors.prepare(scenarios)
    return found


def _why_not_tried(question: RecommendRequest, label: str) -> str | None:
    try:
        size = micro_batch_sizes(question, label)[0]
    except HarnessError as error:
        return str(error)
    world = World.planned(question.gpus, question.gpus_per_node, "cuda")
    return why_not_planned(label, question.job, world, size, question.model)


def why_too_large(configuration: Configuration) -> str:
    """What is missing, at which moment, and the largest part of it."""
    moment = configuration.memory.decisive
    kinds = moment.kinds
    largest = max(kinds, key=lambda kind: kinds[kind], default=None)
    how = f"micro-batch {configuration.micro_batch_size}" + (
        ", checkpointing" if configuration.checkpointing else ""
    )
    part = f"; largest part {largest} {gigabytes(kinds[largest])} GB" if largest else ""
    if configuration.accumulation_steps == 1 and configuration.micro_batch_size > 1:
        part += "; a smaller micro-batch needs more, since gradients that accumulate are not sharded"
    if configuration.memory_bounds is not None:
        least = configuration.held_against_limit(configuration.memory_bounds[0].device_bytes)
        if least.fits:
            there = gigabytes(configuration.memory_bytes)
            return f"may not fit: {configuration.needed_text} of {there} GB at {how}"
    return (
        f"does not fit: {gigabytes(configuration.needed_bytes)} GB of "
        f"{gigabytes(configuration.memory_bytes)} ({gigabytes(-configuration.margin_bytes)} GB too much) "
        f"at {how}, {moment.name}{part}"
    )


def why_slower(configuration: Configuration, best: Configuration) -> str:
    """By how much it is slower than the best, and what of the step explains most of that."""
    if configuration.speed is None or best.speed is None:
        return f"no speed predicted: {configuration.speed_unknown or best.speed_unknown or 'unknown'}"
    if configuration.verdict.barely_fits:
        free = 1 - configuration.needed_bytes / configuration.memory_bytes
        return f"barely fits: {percent(free)} of the device is free"
    slower = 1 - configuration.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu
    if slower <= 0:
        price = "less room" if configuration.is_tight and not best.is_tight else "more moving parts"
        return f"faster by {percent(-slower)}, {TIE}, with {price}"
    step = configuration.speed.step_seconds
    exposed = (configuration.speed.exposed_seconds - best.speed.exposed_seconds) / step
    computing = (configuration.speed.computing_seconds - best.speed.computing_seconds) / step
    reasons = []
    if exposed > SMALL_SHARE:
        reasons.append((exposed, _exposed(configuration)))
    if computing > SMALL_SHARE:
        reasons.append((computing, _more_computing(configuration, best)))
    text = " and ".join(reason for _, reason in sorted(reasons, key=lambda pair: -pair[0]))
    return f"slower by {percent(slower)}" + (f": {text}" if text else f", {TIE}")


def _exposed(configuration: Configuration) -> str:
    speed = configuration.speed
    assert speed is not None
    longest = max(speed.communication, key=lambda term: term.seconds)
    share = percent(speed.exposed_seconds / speed.step_seconds)
    return f"{share} of its step is exposed communication, most of it {longest.name}"


def _more_computing(configuration: Configuration, best: Configuration) -> str:
    """Why it computes longer than the best."""
    assert configuration.speed is not None
    assert best.speed is not None
    if configuration.offload not in ("none", best.offload):
        return f"offload={configuration.offload} updates on the host and copies to and from it"
    if configuration.checkpointing and not best.checkpointing:
        return "it recomputes activations to fit"
    if configuration.micro_batch_size < best.micro_batch_size:
        return f"only micro-batch {configuration.micro_batch_size} fits, which computes less efficiently"
    own, others = configuration.speed.computing, {term.name: term.seconds for term in best.speed.computing}
    most = max(own, key=lambda term: term.seconds - others.get(term.name, 0.0))
    return f"'{most.name}' takes longer"


def _choices(
    question: RecommendRequest, label: str, predictors: Predictors, before: Sequence[Configuration]
) -> list[Configuration]:
    """Without checkpointing and with it, those that fit; what needs least where none does.

    before: the same of another preset, near which they are looked for. Raises HarnessError where neither has
    a prediction.
    """
    choices: list[Configuration] = []
    unknown: HarnessError | None = None
    likely: set[int] = set()  # what fits without checkpointing fits with it
    for checkpointing in question.checkpointing:
        likely |= {c.micro_batch_size for c in before if c.fits and c.checkpointing == checkpointing}
        try:
            near = near_largest(question, label, predictors, checkpointing=checkpointing, likely=likely)
        except HarnessError as error:
            unknown = error
            continue
        choices += near
        likely = {near[0].micro_batch_size} if near[0].fits else set()
        if any(c.fits and not c.is_tight for c in near) and near[0].accumulation_steps == 1:
            break  # recomputation would make no larger micro-batch fit
    if unknown and not choices:
        raise unknown
    return choices
