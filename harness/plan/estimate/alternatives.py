"""What people do where nothing fits, each with what is predicted of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.entry import UnknownBackend
from harness.errors import HarnessError
from harness.plan.coverage import why_memory_unknown
from harness.plan.devices.device import ranks_per_node
from harness.plan.devices.limits import MemoryVerdict
from harness.plan.estimate.row import EstimateRow
from harness.plan.leading import USUAL, about, between, by_speed, simplest_close
from harness.plan.prediction import Prediction, Predictors, predict, with_speed
from harness.plan.scenario import Scenario, why_not_planned, with_settings
from harness.tell.formats import gigabytes

CHECKPOINTING = {"training.activation_checkpointing": True}
CHECKPOINTED = "activation checkpointing"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    CHECKPOINTED: {},
    "8-bit AdamW": {"optimizer.kind": "adamw-8bit"},
    "bf16 without fp32 masters": {"training.precision": "bf16"},
    "LoRA": {"adapter.kind": "lora", "adapter.base_dtype": "bf16"},
    "QLoRA": {"adapter.kind": "lora", "adapter.base_dtype": "nf4"},
}
"""Each with activation checkpointing."""
COMMAND = "  "
"""Begins a line to type."""
OFFLOAD, MORE_GPUS = "offload", "more GPUs"
OFFLOADS = ("cpu", "optimizer")
MOST_TIMES = 64
"""So many times the GPUs are tried."""


@dataclass(frozen=True, kw_only=True)
class Alternative(Prediction):
    """One way out: a scenario that is not the one asked for."""

    name: str
    settings: Mapping[str, Any]
    """What differs from the job, as `--set` takes it."""
    scenario: Scenario

    @property
    def label(self) -> str:
        return self.scenario.label

    @property
    def called(self) -> str:
        """'LoRA, with activation checkpointing' where the job has none."""
        adds = self.name != CHECKPOINTED and not CHECKPOINTING.keys().isdisjoint(self.settings)
        return f"{self.name}, with {CHECKPOINTED}" if adds else self.name

    @property
    def states_alone(self) -> bool:
        """Whether that is all that is known of what it needs."""
        return self.memory is None and self.near_bounds is None

    @property
    def verdict(self) -> MemoryVerdict:
        """Of its memory; not predicted: of what it takes at least if that is too much, else of what it takes
        at most, or of states where that is not known."""
        if self.memory is None and self.memory_bounds is not None:
            least = self.held_against_limit(self._needed(self.memory_bounds[0]))
            if not least.fits:
                return least
        if self.most_memory is not None and not self.states_alone:
            return self.held_against_limit(self._needed(self.most_memory))
        return self.held_against_limit(sum(self.scenario.held_states.values()))

    @property
    def fits(self) -> bool:
        """Whether it is predicted to."""
        return self.verdict.fits and not self.states_alone

    def words(self) -> str:
        """'LoRA: zero3 on 4, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU'."""
        place = f"{self.called}: {self.label} on {self.scenario.world_size:,}, micro-batch "
        size = f"{gigabytes(self.verdict.needed_bytes)} of {gigabytes(self.verdict.device_bytes)} GB"
        if self.memory_bounds is not None:
            ends = [self._needed(bound) for bound in self.memory_bounds]
            if not self.held_against_limit(ends[0]).fits:
                return f"{self.called}: does not fit: at least {size} ({self.label})"
            size = f"{between(ends)} of {gigabytes(self.verdict.device_bytes)} GB"
            if not self.verdict.fits:
                return f"{self.called}: may fit: {size} ({self.label})"
        if self.states_alone:
            verdict = "" if self.verdict.fits else "does not fit: "
            found = f"{self.called}: {verdict}model states alone take {size} ({self.label})"
            return f"{found}; activations are not predicted"
        if not self.fits:
            return f"{self.called}: does not fit: {size} ({self.label})"
        rate = f", about {about(self.tokens_per_second_per_gpu)} tokens/s a GPU" if self.speed else ""
        return f"{place}{self.scenario.micro_batch_size}: {size}{rate}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "backend": self.label,
            "world_size": self.scenario.world_size,
            "micro_batch_size": self.scenario.micro_batch_size,
            "settings": dict(self.settings),
            "fits": None if self.states_alone and self.verdict.fits else self.fits,
            "states_alone": self.states_alone,
            "device_bytes": self.verdict.needed_bytes,
            "limit_bytes": self.verdict.device_bytes,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu or None,
        }


def alternatives(
    scenarios: Sequence[Scenario],
    *,
    limit_bytes: int | None = None,
    without: Collection[str] = (),
    by: Predictors | None = None,
) -> list[Alternative]:
    """Of each way the best of the scenarios it leads to: the fastest that fits, else what needs least.

    `limit_bytes`: for the allocator's peak; None: the memory of the scenarios' device, for all that is on
    it. Ways that the job takes already, that no strategy takes or that have no prediction are left out.
    """
    by, ways = by or Predictors(), []
    for name, given in SETTINGS.items():
        settings = {**CHECKPOINTING, **given}
        changed = [with_settings(scenario, settings) for scenario in scenarios]
        taken = any(new is old for new, old in zip(changed, scenarios, strict=True))
        if name not in without and not taken:
            ways.append((name, _changes(scenarios[0], settings), changed))
    by.prepare([one for *_, changed in ways for one in changed if one and _why_not(one) is None])
    found = [_best(*way, limit_bytes, by) for way in ways]
    if OFFLOAD not in without:
        offloaded = [
            with_settings(_relabelled(scenario, offload), CHECKPOINTING)
            for scenario in scenarios
            for offload in OFFLOADS
        ]
        found.append(_best(OFFLOAD, _changes(scenarios[0], CHECKPOINTING), offloaded, limit_bytes, by))
    if MORE_GPUS not in without:
        found.append(_enough_gpus(scenarios, limit_bytes, by))
    return [alternative for alternative in found if alternative is not None]


def bases(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Those from which ways are tried: the usual strategies, or else the first few."""
    usual = [scenario for scenario in scenarios if scenario.label in USUAL]
    return usual or list(scenarios[: len(USUAL)])


def alternative_lines(
    found: Sequence[Alternative], command: Callable[[Alternative], str] | None = None
) -> Iterator[str]:
    """Those that fit, the fastest first, each with its command in a line of its own; then the others."""
    fitting = sorted((one for one in found if one.fits), key=by_speed)
    if found:
        yield "What fits instead" if fitting else "None of the usual alternatives fits either"
    for one in (*fitting, *(one for one in found if not one.fits)):
        yield f"- {one.words()}"
        if command is not None and one.fits:
            yield f"{COMMAND}{command(one)}"


def of_rows(rows: Sequence[EstimateRow], by: Predictors | None = None) -> list[Alternative]:
    """For the smallest number of ranks of an estimate; empty where something fits, or no GPU was named."""
    first = [row for row in rows if row.world_size == min(row.world_size for row in rows)]
    scenarios = [row.scenario for row in first if row.scenario and row.memory]
    fits = any(row.verdict.fits for row in first if row.verdict)
    if fits or not scenarios or scenarios[0].device is None:
        return []
    return alternatives(bases(scenarios), by=by)


def estimate_command(one: Alternative, words: Sequence[str]) -> str:
    """What predicts it. `words`: of the model, the job and the hardware, as every command repeats them."""
    place = ["--backends", one.label, "--world-size", str(one.scenario.world_size)]
    return shlex.join(["harness", "estimate", *words, *place, *set_words(one.settings)])


def planned_settings(scenario: Scenario) -> dict[str, Any]:
    """What a command sets so that it runs what was planned."""
    samples = scenario.micro_batch_size * scenario.accumulation_steps
    return {
        "runtime.preset": scenario.preset,
        "data.sequence_length": scenario.job.data.sequence_length,
        "training.precision": scenario.job.training.precision,
        "training.global_batch_size": samples
        * registry.mesh_of(scenario.label, scenario.world_size).data_size,
        "training.micro_batch_size": scenario.micro_batch_size,
    }


def option_words(given: Mapping[str, object], assignments: Sequence[str] = ()) -> list[str]:
    """Options that were given, and `--set` as typed, as a command repeats them."""
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return words + [word for text in assignments for word in ("--set", text)]


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """`--set` for each, its values as YAML reads them."""
    texts = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )
    return [word for text in texts for word in ("--set", text)]


def _changes(scenario: Scenario, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that the job does not have."""
    return {
        key: value
        for key, value in settings.items()
        if getattr(getattr(scenario.job, key.partition(".")[0]), key.partition(".")[2]) != value
    }


def _relabelled(scenario: Scenario, offload: str) -> Scenario | None:
    """The same with offload; None: the strategy has none, or not this one."""
    if "offload" not in scenario.options or scenario.strategy.stage == 0:
        return None
    try:
        options = "," if ":" in scenario.label else ":"
        label = registry.canonical_label(f"{scenario.label}{options}offload={offload}")
    except UnknownBackend:
        return None
    return replace(scenario, label=label, options=registry.parse(label)[1].model_dump(mode="json"))


def _enough_gpus(
    scenarios: Sequence[Scenario], limit_bytes: int | None, by: Predictors
) -> Alternative | None:
    """On the smallest number of GPUs, doubled, on which one of them fits; else on the largest."""
    times, best = 2, None
    while times <= MOST_TIMES and (best is None or not best.fits):
        larger = [_on(scenario, scenario.world_size * times) for scenario in scenarios]
        best = _best(MORE_GPUS, {}, larger, limit_bytes, by)
        times *= 2
    return best


def _on(scenario: Scenario, gpus: int) -> Scenario | None:
    sold = ranks_per_node(scenario.device, None)
    per_node = scenario.ranks_per_node if scenario.nodes > 1 else min(gpus, sold)
    return Scenario.of(
        scenario.label, scenario.model, scenario.job, world_size=gpus, ranks_per_node=per_node,
        preset=scenario.preset, micro_batch_size=scenario.micro_batch_size,
        accumulation_steps=scenario.accumulation_steps, torch_device=scenario.torch_device,
        device=scenario.device, fabric=scenario.fabric, constants=scenario.constants,
    )  # fmt: skip


def _best(
    name: str,
    settings: Mapping[str, Any],
    scenarios: Sequence[Scenario | None],
    limit_bytes: int | None,
    by: Predictors,
) -> Alternative | None:
    possible = [one for one in scenarios if one is not None and _why_not(one) is None]
    found = []
    for one in possible:
        with suppress(HarnessError):  # nothing to adapt, and the like
            predicted = predict(one, by, timed=False, limit_bytes=limit_bytes)
            if predicted.memory is not None or why_memory_unknown(one) is not None:
                found.append(Alternative(**vars(predicted), name=name, settings=settings))
    fitting = [with_speed(one, by) for one in found if one.fits]
    if fitting:
        return simplest_close(sorted(fitting, key=by_speed))
    return min(found, key=lambda one: one.verdict.needed_bytes, default=None)


def _why_not(scenario: Scenario) -> str | None:
    """Why a strategy cannot run the job; None: it can."""
    world = World.planned(scenario.world_size, scenario.ranks_per_node, scenario.torch_device)
    return why_not_planned(scenario.label, scenario.job, world, scenario.micro_batch_size, scenario.model)
