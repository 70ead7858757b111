"""What is predicted of a scenario: what it needs, whether it fits, its speed, and what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from harness.errors import HarnessError
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.fsdp.units import reduce_dtype
from harness.forms.terms import STATE_KINDS
from harness.plan.architectures import mixture_of_experts
from harness.plan.coverage import neighbours, why_between, why_memory_unknown
from harness.plan.devices.limits import STATES_SHARE, MemoryVerdict
from harness.plan.memory import MemoryPrediction, host_bytes, memory_bounds, predict_memory
from harness.plan.profiles import Trace, trace_scenarios
from harness.plan.scenario import Scenario
from harness.plan.time.speed import SpeedPrediction, predict_speed

T = TypeVar("T")
FARTHEST_BOUNDS = 3
"""Bounds that are farther apart than this factor say nothing."""
NO_DEVICE = "no GPU was named (--gpu)"


@dataclass(frozen=True, kw_only=True)
class Predictors:
    """What predicts; others in tests."""

    memory: Callable[[Scenario], MemoryPrediction] = predict_memory
    speed: Callable[[Scenario], SpeedPrediction | None] = predict_speed
    least: Callable[[Scenario], int] = lambda _: 0
    """Bytes of the device below which `memory` does not lie, sooner known than that."""
    ahead: Callable[[Iterable[Scenario]], None] = trace_scenarios
    """Told what will be asked, so that profiles are traced together."""

    @classmethod
    def traced_by(cls, trace: Trace | None) -> Predictors:
        """A model that has no profile is traced so, when it is asked for; None: in a new process."""
        return cls(memory=partial(predict_memory, trace=trace), ahead=lambda _: None)

    def prepare(self, scenarios: Iterable[Scenario]) -> None:
        """Trace what the memory of scenarios needs: their own profiles, or those of their neighbours."""
        asked: list[Scenario] = []
        for one in scenarios:
            with suppress(HarnessError):  # said where it is predicted
                asked += (one,) if why_memory_unknown(one) is None else neighbours(one) or ()
        self.ahead(asked)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of the rank that needs most; None where there is no prediction, with the reason."""

    scenario: Scenario | None = None
    """None: the job cannot run so."""
    memory: MemoryPrediction | None = None
    memory_unknown: str | None = None
    memory_bounds: tuple[MemoryPrediction, MemoryPrediction] | None = None
    """Of a peak that is not predicted, the least and the most of which are; None: they are not known."""
    speed: SpeedPrediction | None = None
    speed_unknown: str | None = None
    limit_bytes: int | None = None
    """Of the allocator's peak; None: the device's memory, of all that is on it."""

    @property
    def verdict(self) -> MemoryVerdict | None:
        """None: no limit, or memory not predicted: model states alone fit, or of bounds only the less."""
        if self.scenario is None or (self.limit_bytes is None and self.scenario.device is None):
            return None
        if self.memory is not None:
            return self.held_against_limit(self._needed(self.memory))
        if self.memory_bounds is not None:  # However far apart: what not even the least fits is refused.
            least, most = (self.held_against_limit(self._needed(bound)) for bound in self.memory_bounds)
            return most if most.fits else least if not least.fits else None
        alone = self.held_against_limit(self.state_bytes(*STATE_KINDS) or 0)
        return None if alone.fits else alone

    @property
    def most_memory(self) -> MemoryPrediction | None:
        """What is predicted, or of bounds the most; None: neither is known."""
        return self.memory or (self.memory_bounds[1] if self.memory_bounds else None)

    @property
    def needed_between(self) -> tuple[int, ...]:
        """Bytes that it needs, or the least and the most of near bounds, or the most of others; empty: not
        known."""
        known = (self.near_bounds if self.memory is None else self.memory_bounds) or (self.most_memory,)
        return tuple(self._needed(memory) for memory in known if memory is not None)

    @property
    def host_bytes_per_node(self) -> int:
        """0: nothing lies there, or that is not known."""
        if self.states_leave_room and self.scenario is not None:
            return host_bytes(self.scenario)
        return 0 if self.most_memory is None else self.most_memory.host_bytes_per_node

    @property
    def there_bytes(self) -> int:
        """What it is held against: a limit, or the device's memory."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        assert self.scenario is not None
        assert self.scenario.device is not None
        return self.scenario.device.memory_bytes

    def _needed(self, memory: MemoryPrediction) -> int:
        return memory.device_bytes if self.limit_bytes is None else memory.peak_bytes

    def held_against_limit(self, needed_bytes: int) -> MemoryVerdict:
        """What is needed beside what there is."""
        return MemoryVerdict(needed_bytes=needed_bytes, device_bytes=self.there_bytes)

    def state_bytes(self, *kinds: str) -> int | None:
        """Model states of some kinds on the device, between backward pass and update; None: not known."""
        if self.scenario is None or (self.scenario.states.unknown is not None and "optimizer" in kinds):
            return None
        return sum(self.scenario.held_states.get(kind, 0) for kind in kinds)

    @property
    def states_leave_room(self) -> bool:
        """Of a mixture of experts, of which no more is known, whether `held_beside_activations` is little."""
        if self.scenario is None or self.memory or self.memory_bounds or not self.scenario.device:
            return False
        is_mixture = mixture_of_experts(self.scenario.model.config) and self.scenario.states.unknown is None
        return is_mixture and self.held_beside_activations <= STATES_SHARE * self.there_bytes

    @property
    def held_beside_activations(self) -> int:
        """Bytes of model states; where FSDP keeps weights gathered after the forward pass, or adds up
        gradients between micro-steps, of these too, whole."""
        assert self.scenario is not None
        states, strategy = self.scenario.held_states, self.scenario.strategy
        held = self.state_bytes(*STATE_KINDS) or 0
        if strategy.family not in ("fsdp1", "fsdp2"):
            return held
        workload, whole = self.scenario.workload(), 0
        if strategy.sharding in ("grad-op", "hybrid-grad-op"):
            whole += workload.layout.parameter_count * DTYPE_BYTES[workload.compute_dtype]
        if workload.accumulation_steps > workload.reductions:
            whole += workload.layout.trained_count * DTYPE_BYTES[reduce_dtype(workload)]
        return max(held, held - states.get("gradients", 0) + whole)

    @property
    def near_bounds(self) -> tuple[MemoryPrediction, MemoryPrediction] | None:
        """Bounds that say something: they lie within a factor of `FARTHEST_BOUNDS`."""
        if self.memory_bounds is None:
            return None
        least, most = self.memory_bounds
        return self.memory_bounds if most.peak_bytes <= FARTHEST_BOUNDS * least.peak_bytes else None

    @property
    def peak_bytes_between(self) -> tuple[int, int] | None:
        """Of a peak that is not predicted itself, in bytes."""
        if self.near_bounds is None:
            return None
        least, most = self.near_bounds
        return least.peak_bytes, most.peak_bytes

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """0 where no speed is predicted."""
        return 0.0 if self.speed is None else self.speed.tokens_per_second_per_gpu


def predict(
    scenario: Scenario, by: Predictors | None = None, *, timed: bool = True, limit_bytes: int | None = None
) -> Prediction:
    """Memory, or its bounds, and speed; not `timed`: no speed. What has no prediction says why."""
    by = by or Predictors()
    memory, unknown = tried(lambda: by.memory(scenario), why_memory_unknown(scenario))
    bounds = None if memory else memory_bounds(scenario, by.memory)
    if bounds and bounds[0].peak_bytes == bounds[1].peak_bytes:  # what is not known does not decide
        memory, unknown, bounds = bounds[1], None, None
    found = Prediction(
        scenario=scenario, memory=memory, memory_unknown=why_between(scenario) if bounds else unknown,
        memory_bounds=bounds, limit_bytes=limit_bytes,
    )  # fmt: skip
    return with_speed(found, by) if timed else found


P = TypeVar("P", bound=Prediction)


def with_speed(found: P, by: Predictors) -> P:
    """The same with its speed, or why there is none."""
    scenario = found.scenario
    assert scenario is not None
    speed, unknown = tried(lambda: by.speed(scenario), None if scenario.device else NO_DEVICE)
    return replace(found, speed=speed, speed_unknown=unknown)


def tried(prediction: Callable[[], T], unknown: str | None = None) -> tuple[T | None, str | None]:
    """A prediction, or why there is none; `unknown`: what is known not to be predicted."""
    if unknown is not None:
        return None, unknown
    try:
        return prediction(), None
    except HarnessError as error:
        return None, str(error)
