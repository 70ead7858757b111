"""What people do where nothing fits, each with what is predicted of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.entry import UnknownBackend
from harness.errors import HarnessError
from harness.judge.cell import CellName
from harness.plan.coverage import why_memory_unknown
from harness.plan.estimate.row import EstimateRow
from harness.plan.leading import USUAL, about, by_speed, simplest_close
from harness.plan.limits import MemoryVerdict
from harness.plan.memory import MemoryPrediction, predict_memory
from harness.plan.profiles import trace_scenarios
from harness.plan.scenario import Scenario, why_not_planned, with_settings
from harness.plan.speed import SpeedPrediction, predict_speed
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
OFFLOAD, MORE_GPUS = "offload", "more GPUs"
OFFLOADS = ("cpu", "optimizer")
MOST_TIMES = 64
"""So many times the GPUs are tried."""

Memory = Callable[[Scenario], MemoryPrediction]
Speed = Callable[[Scenario], SpeedPrediction | None]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way out: a scenario that is not the one asked for."""

    name: str
    settings: Mapping[str, Any]
    """What differs from the job, as `--set` takes it."""
    scenario: Scenario
    limit_bytes: int
    needed_bytes: int
    states_alone: bool = False
    """Whether that is all that is known of what it needs."""
    speed: SpeedPrediction | None = None

    @property
    def label(self) -> str:
        return self.scenario.label

    @property
    def verdict(self) -> MemoryVerdict:
        return MemoryVerdict(needed_bytes=self.needed_bytes, device_bytes=self.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to."""
        return self.verdict.fits and not self.states_alone

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """0 where no speed is predicted."""
        return self.speed.tokens_per_second_per_gpu if self.speed else 0.0

    def words(self) -> str:
        """'LoRA: zero3 on 4, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU'."""
        place = f"{self.name}: {self.label} on {self.scenario.world_size:,}, micro-batch "
        size = f"{gigabytes(self.needed_bytes)} of {gigabytes(self.limit_bytes)} GB"
        if self.states_alone:
            verdict = "" if self.verdict.fits else "does not fit: "
            found = f"{self.name}: {verdict}model states alone take {size} ({self.label})"
            return f"{found}; activations are not predicted"
        if not self.fits:
            return f"{self.name}: does not fit: {size} ({self.label})"
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
            "device_bytes": self.needed_bytes,
            "limit_bytes": self.limit_bytes,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu or None,
        }


def alternatives(
    scenarios: Sequence[Scenario],
    *,
    limit_bytes: int | None = None,
    without: Collection[str] = (),
    memory: Memory = predict_memory,
    speed: Speed = predict_speed,
    ahead: Callable[[Iterable[Scenario]], None] = trace_scenarios,
) -> list[Alternative]:
    """Of each way the best of the scenarios it leads to: the fastest that fits, else what needs least.

    `ahead` is told what will be asked, so that profiles are traced together.

    `limit_bytes`: for the allocator's peak; None: the memory of the scenarios' device, for all that is on
    it. Ways that the job takes already, that no strategy takes or that have no prediction are left out.
    """
    ways = []
    for name, given in SETTINGS.items():
        settings = {**CHECKPOINTING, **given}
        changed = [with_settings(scenario, settings) for scenario in scenarios]
        taken = any(new is old for new, old in zip(changed, scenarios, strict=True))
        if name not in without and not taken:
            ways.append((name, settings, changed))
    ahead([one for *_, changed in ways for one in changed if one and _why_not(one) is None])
    found = [_best(*way, limit_bytes, memory, speed) for way in ways]
    if OFFLOAD not in without:
        offloaded = [
            with_settings(_relabelled(scenario, offload), CHECKPOINTING)
            for scenario in scenarios
            for offload in OFFLOADS
        ]
        found.append(_best(OFFLOAD, CHECKPOINTING, offloaded, limit_bytes, memory, speed))
    if MORE_GPUS not in without:
        found.append(_enough_gpus(scenarios, limit_bytes, memory, speed))
    return [alternative for alternative in found if alternative is not None]


def bases(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Those from which ways are tried: the usual strategies, or else the first few."""
    usual = [scenario for scenario in scenarios if scenario.label in USUAL]
    return usual or list(scenarios[: len(USUAL)])


def alternative_lines(
    found: Sequence[Alternative], command: Callable[[Alternative], str] | None = None
) -> Iterator[str]:
    """Those that fit with the command that runs each, the fastest first; then the others."""
    fitting = sorted((one for one in found if one.fits), key=by_speed)
    if found:
        yield "What fits instead" if fitting else "None of the usual alternatives fits either"
    for one in (*fitting, *(one for one in found if not one.fits)):
        yield f"- {one.words()}"
        if command is not None and one.fits:
            yield f"  {command(one)}"


def of_rows(rows: Sequence[EstimateRow]) -> list[Alternative]:
    """For the smallest number of ranks of an estimate; empty where something fits, or no GPU was named."""
    first = [row for row in rows if row.world_size == min(row.world_size for row in rows)]
    scenarios = [row.scenario for row in first if row.scenario and row.memory]
    fits = any(row.verdict.fits for row in first if row.verdict)
    if fits or not scenarios or scenarios[0].device is None:
        return []
    return alternatives(bases(scenarios))


def as_settings(one: Alternative) -> str:
    """What to say instead in the same command."""
    return " ".join([f"backend {CellName(one.label, one.scenario.world_size)}", *set_words(one.settings)])


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


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """`--set` for each, its values as YAML reads them."""
    texts = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )
    return [word for text in texts for word in ("--set", text)]


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
    scenarios: Sequence[Scenario], limit_bytes: int | None, memory: Memory, speed: Speed
) -> Alternative | None:
    """On the smallest number of GPUs, doubled, on which one of them fits; else on the largest."""
    times, best = 2, None
    while times <= MOST_TIMES and (best is None or not best.fits):
        larger = [_on(scenario, scenario.world_size * times) for scenario in scenarios]
        best = _best(MORE_GPUS, {}, larger, limit_bytes, memory, speed)
        times *= 2
    return best


def _on(scenario: Scenario, gpus: int) -> Scenario | None:
    per_node = scenario.ranks_per_node if scenario.nodes > 1 else min(gpus, 8)
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
    memory: Memory,
    speed: Speed,
) -> Alternative | None:
    found = []
    for scenario in scenarios:
        if scenario is None or _why_not(scenario) is not None:
            continue
        try:
            states_alone = why_memory_unknown(scenario) is not None
            needed = _needed(scenario, None if states_alone else memory(scenario), limit_bytes)
        except HarnessError:
            continue
        assert limit_bytes is not None or scenario.device is not None
        found.append(
            Alternative(
                name=name,
                settings=settings,
                scenario=scenario,
                limit_bytes=limit_bytes or scenario.device.memory_bytes,  # type: ignore[union-attr]
                needed_bytes=needed,
                states_alone=states_alone,
            )
        )
    fitting = [_timed(one, speed) for one in found if one.fits]
    if fitting:
        return simplest_close(sorted(fitting, key=by_speed))
    return min(found, key=lambda one: one.needed_bytes, default=None)


def _needed(scenario: Scenario, predicted: MemoryPrediction | None, limit_bytes: int | None) -> int:
    """What is held against the limit; not predicted: model states."""
    if predicted is None:
        return sum(scenario.held_states.values())
    return predicted.device_bytes if limit_bytes is None else predicted.peak_bytes


def _timed(one: Alternative, speed: Speed) -> Alternative:
    if one.scenario.device is None:
        return one
    try:
        return replace(one, speed=speed(one.scenario))
    except HarnessError:
        return one


def _why_not(scenario: Scenario) -> str | None:
    """Why a strategy cannot run the job; None: it can."""
    world = World.planned(scenario.world_size, scenario.ranks_per_node, scenario.torch_device)
    return why_not_planned(scenario.label, scenario.job, world, scenario.micro_batch_size, scenario.model)
