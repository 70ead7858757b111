"""What people do where nothing fits, each with what is predicted of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.errors import HarnessError
from harness.judge.wording import listed
from harness.plan import search
from harness.plan.hardware import joined_by, ranks_per_node
from harness.plan.model import mixture_of_experts
from harness.plan.prediction import Prediction, Predictors, predict, with_speed
from harness.plan.scenario import Scenario, why_memory_unknown, why_not_planned, with_settings
from harness.tell.formats import gigabytes

ONE_SAMPLE, CHECKPOINTED = "micro-batches of one sample", "activation checkpointing"
CHUNKED = "a chunked loss"
RELIEFS: Mapping[str, Mapping[str, Any]] = {
    ONE_SAMPLE: {},  # of each scenario its own, with as many samples in a step
    CHECKPOINTED: {"training.activation_checkpointing": True},
    CHUNKED: {"loss.chunk_tokens": 1024},
}
"""What leaves the training as it is, and goes along with each other way."""
CHUNKED_SHARE = 0.05
"""Of the memory, from which one copy of the logits in fp32 makes a chunked loss worth trying."""
STATES: Mapping[str, Mapping[str, Any]] = {
    "8-bit AdamW": {"optimizer.kind": "adamw-8bit"},
    "bf16 without fp32 masters": {"training.precision": "bf16"},
}
LORA: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"adapter.kind": "lora", "adapter.base_dtype": "bf16"},
    "QLoRA": {"adapter.kind": "lora", "adapter.base_dtype": "nf4"},
}
LORA_OF_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {**LORA["LoRA"], "adapter.targets": ["q_proj", "v_proj"]},
}
"""peft has no choice for every mixture, and 4 bits are for linear layers, which experts are not."""
OF_ADAPTED: Mapping[str, Mapping[str, Any]] = {
    "a frozen base in bf16": {"adapter.base_dtype": "bf16"},
    "a frozen base in nf4 (QLoRA)": {"adapter.base_dtype": "nf4"},
}
"""For a job that trains adapters already."""
ROOM_SHARE = 0.1
"""Of the memory: a way that needs so much less than another gains something."""
COMMAND = "  "
"""Begins a line to type."""
OFFLOAD, MORE_GPUS, CONTEXT = "offload", "more GPUs", "context parallelism"
EACH_REDUCED = "gradients reduced in every micro-step"
SHARING = {"fsdp": "fsdp-cp", "zero3": "ulysses-zero3"}
"""The same strategies with ranks of a node that share each sample."""
LONG_TOKENS = 8192
"""Of a sample, from which that is worth trying."""
MOST_TIMES = 64
"""So many times the GPUs are tried."""


@dataclass(frozen=True, kw_only=True)
class Alternative(Prediction):
    """One way out: a scenario that is not the one asked for."""

    name: str
    """Of what is changed besides `reliefs`; empty: nothing is."""
    reliefs: tuple[str, ...] = ()
    """Of `RELIEFS`."""
    settings: Mapping[str, Any]
    """What differs from the job, as `--set` takes it."""

    @property
    def called(self) -> str:
        """'LoRA, with activation checkpointing' where the job has none."""
        reliefs = listed(self.reliefs)
        return f"{self.name}, with {reliefs}" if self.name and reliefs else self.name or reliefs

    @property
    def states_alone(self) -> bool:
        """Whether that is all that is known of what it needs."""
        return self.memory is None and self.near_bounds is None

    @property
    def figures(self) -> str:
        """'zero3 on 4 ranks, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU', of what fits."""
        size = self.planned.micro_batch_size
        return f"{self.cell}, micro-batch {size}{search.if_joined(self.planned)}: {search.figures(self)}"

    def words(self) -> str:
        """'LoRA: zero3 on 4 ranks, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU'."""
        if self.is_roomy:
            return f"{self.called}: {self.figures}"
        verdict, there = self.verdict, gigabytes(self.there_bytes)
        if verdict is not None and not verdict.fits:
            least = "" if self.memory else "at least " if self.memory_bounds else "model states alone take "
            size = f"{gigabytes(verdict.needed_bytes)} of {there} GB"
            return f"{self.called}: does not fit: {least}{size} ({self.label})"
        if self.states_alone:
            size = f"model states take {gigabytes(self.needed_bytes)} of {there} GB"
            return f"{self.called}: {size} ({self.label}); activations are not predicted"
        said = "may fit" if verdict is None else verdict.said
        return f"{self.called}: {said}: {search.figures(self, marked=False)} ({self.label})"

    def as_json(self) -> dict[str, Any]:
        scenario = self.planned
        return {
            "name": self.called,
            "backend": self.label,
            "world_size": scenario.world_size,
            "micro_batch_size": scenario.micro_batch_size,
            "settings": dict(self.settings),
            "fits": None if self.verdict is None else self.is_roomy,
            "verdict": self.verdict.said if self.verdict else None,
            "states_alone": self.states_alone,
            "device_bytes": self.needed_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "limit_bytes": self.there_bytes,
            "fabric": scenario.fabric.name if scenario.fabric and scenario.nodes > 1 else None,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu or None,
        }


def alternatives(
    scenarios: Sequence[Scenario],
    *,
    without: Collection[str] = (),
    by: Predictors | None = None,
    keeps_batch: bool = False,
) -> list[Alternative]:
    """Ways out, the one that changes least first; of each the best of the scenarios that it leads to.

    That is the fastest that fits, with the fewest reliefs. A way is left out that gains nothing over those
    before it; where none fits all stay, each with what needs least. Where reliefs are enough and leave room,
    nothing else of the training is changed. One GPU alone shards nothing, and more GPUs come last there.
    Ways that the job takes already, that no strategy takes or that have no prediction are left out.
    `keeps_batch`: more GPUs accumulate less, rather than as often.
    """
    by = by or Predictors()
    if not scenarios:
        return []
    helps, trial = _reliefs(scenarios[0], without), _Trial(by, keeps_batch)
    sensible = [one for one in scenarios if not search.pointless(one.label, one.world_size)] or list(
        scenarios
    )
    found = [one for relief in helps[1:] if (one := trial.best("", relief, {}, sensible))]
    if any(one.is_roomy and len(one.reliefs) == 1 for one in found):  # then several together say no more
        found = [one for one in found if len(one.reliefs) == 1]
    is_enough = any(one.leaves_room for one in found)
    more = [] if MORE_GPUS in without else trial.on_more_gpus(
        scenarios, helps[:1] if any(one.is_roomy for one in found) else helps
    )  # fmt: skip
    last = more if scenarios[0].world_size == 1 else []
    if not is_enough:
        each = [new for one in scenarios if (new := each_reduced(one))]
        found += trial.first_fit(EACH_REDUCED, helps, {}, each)
    if CONTEXT not in without and not is_enough:
        found += trial.first_fit(CONTEXT, helps, {}, list(_sharing(scenarios)))
    found += [] if last else more
    if is_enough:
        return _worthwhile(found + last)
    offloaded = [new for one in scenarios for new in _offloaded(one)]
    if OFFLOAD not in without:
        found += trial.first_fit(OFFLOAD, helps, {}, offloaded)
    changes = {name: given for name, given in _changes_of(scenarios[0]).items() if name not in without}
    for name, given in changes.items():
        found += trial.first_fit(name, helps, given, sensible)
    if not any(one.is_roomy and one.name in changes for one in found):
        for name, given in changes.items():
            found += [] if name in STATES else trial.first_fit(name, helps, given, offloaded)
    return _worthwhile(found + last)


def bases(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Scenarios from which ways are tried: the usual strategies, or else the first few."""
    usual = [scenario for scenario in scenarios if scenario.label in (registry.REFERENCE, *search.USUAL)]
    return usual or list(scenarios[: len(search.USUAL)])


def alternative_lines(
    found: Sequence[Alternative], command: Callable[[Alternative], str] | None = None
) -> Iterator[str]:
    """Alternatives that fit, each with its command in a line of its own; where none does, what each needs."""
    fitting = [one for one in found if one.is_roomy]
    if found:
        yield "What fits instead" if fitting else "None of the usual alternatives fits either"
    for one in fitting or found:
        yield f"- {one.words()}"
        if command is not None and one.is_roomy:
            yield f"{COMMAND}{command(one)}"


def least_change(found: Sequence[Alternative]) -> Alternative | None:
    """The alternative that fits and changes least; None: none fits."""
    return next((one for one in found if one.is_roomy), None)


def nothing_fits(found: Sequence[Alternative]) -> str | None:
    """'nothing fits; with activation checkpointing: zero1 on 1 rank, micro-batch 1: 16.9 of ...', of the way
    that changes least; None: none fits."""
    one = least_change(found)
    if one is None:
        return None
    return f"nothing fits; {'' if one.name else 'with '}{one.called}: {one.figures}"


def reaches_more(found: Sequence[Alternative], than: float) -> list[str]:
    """'8-bit AdamW reaches more: zero3 on 8 ranks, ...' of the fastest way that fits; empty: none is faster.

    Of those that are faster by more than predictions can tell, only the kind that changes the training least.
    than: tokens per second and GPU of the answer.
    """
    faster = [
        one
        for one in found
        if one.is_roomy
        and one.name != MORE_GPUS
        and one.tokens_per_second_per_gpu * (1 - search.CLOSE_SHARE) > than
    ]
    least = min(map(_change, faster), default=None)
    ways = sorted((one for one in faster if _change(one) == least), key=search.by_speed)
    fastest = min(search.close_to_first(ways), key=lambda one: not one.leaves_room, default=None)
    if fastest is None:
        return []
    way = f"{fastest.called}," if fastest.name and fastest.reliefs else fastest.called
    return [f"{'' if fastest.name else 'With '}{way} reaches more: {fastest.figures}"]


def _change(one: Alternative) -> int:
    """How much of the training a way changes: nothing, what is kept of the weights, or what is trained."""
    return 0 if one.name in ("", OFFLOAD, CONTEXT) else 1 if one.name in STATES else 2


def _changes(scenario: Scenario, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, among these, that the job does not have."""
    return {
        key: value
        for key, value in settings.items()
        if getattr(getattr(scenario.job, key.partition(".")[0]), key.partition(".")[2]) != value
    }


def _sharing(scenarios: Sequence[Scenario]) -> Iterator[Scenario]:
    """Scenarios with each sample divided over groups of ranks, of each size that divides a node."""
    for one in scenarios:
        name, inside = SHARING.get(one.label), one.ranks_of_node
        if name is None or one.job.data.sequence_length < LONG_TOKENS:
            continue
        for degree in search.divisors(inside)[1:]:
            label = registry.canonical_label(f"{name}:sequence={degree}")
            yield one.under(label, accumulation_steps=one.accumulation_steps * degree)


def _offloaded(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with each offload of their strategy, unless it has one."""
    entry, own = registry.parse(scenario.label)
    for each in search.offloads(entry, scenario.job):
        added = {key: value for key, value in each.items() if key not in own.model_fields_set}
        if "offload" in added:
            yield scenario.under(registry.label_with(scenario.label, **added))


def each_reduced(scenario: Scenario) -> Scenario | None:
    """Scenario with gradients reduced in every micro-step; None: as of `reducing_each`, or a single one."""
    label = search.reducing_each(scenario.label) if scenario.accumulation_steps > 1 else None
    return None if label is None else scenario.under(label)


def _changes_of(scenario: Scenario) -> dict[str, Mapping[str, Any]]:
    """Changes of what is trained or kept, the smaller first."""
    adapter = scenario.job.adapter
    if adapter.is_quantised:
        return dict(STATES)
    lora = LORA_OF_EXPERTS if mixture_of_experts(scenario.model.config) else LORA
    return {**STATES, **(OF_ADAPTED if adapter.is_present else lora)}


def logits_bytes(scenario: Scenario) -> int:
    """One copy in fp32 of what a micro-step has; 0: it has no vocabulary."""
    tokens = scenario.micro_batch_size * scenario.job.data.sequence_length
    return 4 * tokens * (scenario.model.config.get("vocab_size") or 0)


def _reliefs(scenario: Scenario, without: Collection[str]) -> list[tuple[str, ...]]:
    """Sets of reliefs to try, the smaller first, without those that the job has or that are not worth it.

    Of a mixture of experts only states are known, which reliefs leave as they are.
    """
    if mixture_of_experts(scenario.model.config):
        return [()]
    open_ones = [
        name
        for name in RELIEFS
        if name not in without
        and (relieved := with_settings(scenario, _settings((name,), scenario))) is not None
        and relieved is not scenario
    ]
    there = scenario.device.memory_bytes if scenario.device else 0
    if CHUNKED in open_ones and logits_bytes(scenario) < CHUNKED_SHARE * there:
        open_ones.remove(CHUNKED)
    return [chosen for count in range(len(open_ones) + 1) for chosen in combinations(open_ones, count)]


def _settings(reliefs: Sequence[str], scenario: Scenario) -> dict[str, Any]:
    found = {key: value for name in reliefs for key, value in RELIEFS[name].items()}
    if ONE_SAMPLE not in reliefs or scenario.micro_batch_size == 1:
        return found
    of_each_rank = scenario.samples * scenario.mesh.data_size // scenario.world_size  # as a job says it
    return {**found, "training.micro_batch_size": 1, "training.accumulation_steps": of_each_rank}


def _changed(scenario: Scenario, reliefs: Sequence[str], given: Mapping[str, Any]) -> Scenario | None:
    """The scenario of the job with other settings; None: they contradict it, or it cannot run so."""
    settings = {**given, **_settings(reliefs, scenario)}
    new = with_settings(scenario, settings)
    if new is not None and "training.accumulation_steps" in settings:
        new = replace(new, micro_batch_size=1, accumulation_steps=scenario.samples)
    if new is None:
        return None
    world = World.planned(new.world_size, new.ranks_per_node, new.torch_device)
    why_not = why_not_planned(new.label, new.job, world, new.micro_batch_size, new.model)
    return new if why_not is None else None


def _worthwhile(found: Sequence[Alternative]) -> list[Alternative]:
    """Alternatives that fit and gain over each before them; all, if none fits."""
    kept: list[Alternative] = []
    for one in found:
        if one.is_roomy and all(_gains(one, over) for over in kept):
            kept.append(one)
    return kept or list(found)


def _gains(one: Alternative, over: Alternative) -> bool:
    """Whether a way that changes more takes fewer GPUs, is faster, or leaves much more room on as many."""
    rate, other = one.tokens_per_second_per_gpu, over.tokens_per_second_per_gpu
    if one.name == MORE_GPUS and over.name not in ("", OFFLOAD, CONTEXT):
        return True  # which trains as asked
    if one.planned.world_size != over.planned.world_size:
        return one.planned.world_size < over.planned.world_size or rate * (1 - search.CLOSE_SHARE) > other
    if rate * (1 - search.CLOSE_SHARE) > other or (over.name == OFFLOAD and not other):  # offload is slow
        return True
    return over.needed_bytes - one.needed_bytes > ROOM_SHARE * one.there_bytes


@dataclass(frozen=True)
class _Trial:
    """Predicts scenarios of a way."""

    by: Predictors
    keeps_batch: bool

    def best(
        self,
        name: str,
        reliefs: tuple[str, ...],
        given: Mapping[str, Any],
        scenarios: Sequence[Scenario],
    ) -> Alternative | None:
        """The one to take of those that fit, else what needs least; None: nothing is predicted of any."""
        if not scenarios:
            return None
        changes = _changes(scenarios[0], {**given, **_settings(reliefs, scenarios[0])})
        found = []
        possible = [new for one in scenarios if (new := _changed(one, reliefs, given)) is not None]
        for one in possible:
            with suppress(HarnessError):  # nothing to adapt, and the like
                predicted = predict(one, self.by, timed=False)
                if predicted.memory is not None or why_memory_unknown(one) is not None:
                    found.append(Alternative(**vars(predicted), name=name, reliefs=reliefs, settings=changes))
        fitting = [with_speed(one, self.by) for one in found if one.is_roomy]
        if fitting:
            return search.simplest_close(sorted(fitting, key=search.by_speed))
        return min(found, key=lambda one: one.needed_bytes, default=None)

    def first_fit(
        self,
        name: str,
        helps: Sequence[tuple[str, ...]],
        given: Mapping[str, Any],
        scenarios: Sequence[Scenario],
    ) -> list[Alternative]:
        """The way with the fewest reliefs with which it fits, unless more leave room at the same speed; else
        what needs least; empty: none is known."""
        if given and all(with_settings(one, given) in (None, one) for one in scenarios):
            return []  # the job has it
        found: list[Alternative] = []
        for reliefs in helps:
            one = self.best(name, reliefs, given, scenarios)
            found += [one] if one else []
            if one is not None and one.leaves_room:
                break
        fewest = next((one for one in found if one.is_roomy), None)
        if fewest is not None:
            last, least = found[-1], (1 - search.CLOSE_SHARE) * fewest.tokens_per_second_per_gpu
            return [last if last.leaves_room and last.tokens_per_second_per_gpu >= least else fewest]
        return sorted(found, key=lambda one: one.needed_bytes)[:1]

    def on_more_gpus(
        self, scenarios: Sequence[Scenario], helps: Sequence[tuple[str, ...]]
    ) -> list[Alternative]:
        """On the smallest number of GPUs, doubled, on which one of them fits; else on the largest."""
        found: list[Alternative] = []
        times = 2
        while times <= MOST_TIMES and not any(one.is_roomy for one in found):
            larger = [
                _on(base, base.world_size * times, self.keeps_batch)
                for base in scenarios
                if not self.keeps_batch or base.samples >= times
            ]
            most = self.best(MORE_GPUS, helps[-1], {}, larger)
            found = [most] if most else []
            if most and most.is_roomy:
                found = self.first_fit(MORE_GPUS, helps, {}, larger)
            times *= 2
        return found


def _on(scenario: Scenario, gpus: int, keeps_batch: bool) -> Scenario:
    sold = ranks_per_node(scenario.device, None)
    steps = scenario.accumulation_steps
    return scenario.under(
        scenario.label,
        world_size=gpus,
        ranks_per_node=scenario.ranks_per_node if scenario.nodes > 1 else min(gpus, sold),
        accumulation_steps=max(1, steps * scenario.world_size // gpus) if keeps_batch else steps,
        fabric=scenario.fabric and joined_by(scenario.fabric, scenario.device, gpus),
    )
