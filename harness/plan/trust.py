"""How wrong predictions like one have been, of runs of others and of CPU ranks; what they rest on most."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.judge.wording import listed
from harness.plan.constants import SUSTAINED_SHARES, TimeConstants, default_constants
from harness.plan.memory import device_overhead
from harness.plan.scenario import Scenario

ERRORS = Path(__file__).with_name("data") / "published-errors.json"
"""By run, relative, without those that a constant is from; `python -m benchmarks.published` writes it."""
CPU_ERRORS = ERRORS.with_name("cpu-errors.json")
"""The same of measured CPU ranks; `python -m benchmarks.memory_predictions` writes it."""
CPU = "cpu"
"""What the peak of those is, among the statistics of published ones."""
PUBLISHED = TimeConstants.origin
ENOUGH = 10
"""Runs that a family of strategies needs before it is judged by its own alone."""
SHORT_TOKENS = 1024
"""Samples below are steps that wait for the host."""
HOST_SHARE = 0.1
"""Of a step, from which waiting for the host decides it."""
WORTH_SAYING = 0.05
"""Bias from which a direction is named."""
SMALL = 0.005
"""Errors below are given to a digit."""


@dataclass(frozen=True, kw_only=True)
class KnownErrors:
    """Errors of one figure over runs that were measured."""

    runs: int
    whose: str = "published runs"
    typical: float
    """Mean for memory, median for speed, without sign."""
    bias: float
    worst: float

    def text(self) -> str:
        """'±9 % (61 published runs, mostly 10 % too low)', '±0.04 % (19 runs on CPU ranks)'."""
        direction = ""
        if abs(self.bias) >= WORTH_SAYING:
            direction = f", mostly {abs(self.bias):.0%} too {'low' if self.bias < 0 else 'high'}"
        size = f"{self.typical:.0%}" if self.typical >= SMALL else f"{100 * self.typical:.1g}%"
        return f"±{size} ({self.runs} {self.whose}{direction})".replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How wrong answers like one have been."""

    allocated: KnownErrors | None
    reserved: KnownErrors | None
    """Reserved or device memory."""
    speed: KnownErrors | None
    assumption: str | None
    """The largest that the speed rests on, or the memory where no speed is predicted."""

    def lines(self) -> list[str]:
        """In words, for people."""
        figures = (("allocated", self.allocated), ("reserved", self.reserved), ("speed", self.speed))
        parts = [f"{name} {known.text()}" for name, known in figures if known is not None]
        known = ", ".join(parts) or "not known, since no run like this was compared"
        found = [f"typical error of such predictions: {known}"]
        return found + ([f"largest assumption: {self.assumption}"] if self.assumption else [])

    def as_json(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            name: vars(known) if known else None
            for name, known in (
                ("allocated", self.allocated), ("reserved", self.reserved), ("speed", self.speed),
            )
        } | {"assumption": self.assumption}  # fmt: skip


def trust_in(*scenarios: Scenario, speed: bool = True, host_share: float | None = None) -> Trust:
    """Of runs with the same kind of training, and of the same families of strategies if there are enough.

    `scenarios`: of one job on one kind of device. `speed`: whether the answer predicts any. `host_share`: of
    a step that waits for the host, at most; None: not known, so the length of a sample decides.
    """
    first = scenarios[0]
    adapted, families = first.job.adapter.is_present, {one.strategy.family for one in scenarios}
    short = first.job.data.sequence_length < SHORT_TOKENS
    alike = [run for run in measured_errors() if run["adapted"] == adapted]
    kinds = {"allocated": (CPU,), "reserved": ()}
    if first.torch_device != "cpu":
        kinds = {"allocated": ("allocated", "not said"), "reserved": ("reserved", "device")}
    memory = {
        kind: _known([run for run in alike if run["statistic"] in kinds[kind]], families, "memory", of=mean)
        for kind in kinds
    }
    speeds = [run for run in alike if (run["tokens"] < SHORT_TOKENS) == short]
    speed = speed and first.device is not None
    return Trust(
        **memory,
        speed=_known(speeds, families, "speed", of=median) if speed else None,
        assumption=largest_assumption(first, host_share) if speed else largest_of_memory(first),
    )


def largest_of_memory(scenario: Scenario) -> str:
    """What of a peak no closed form has."""
    if scenario.torch_device == "cpu":
        return "gloo gives its buffers back at once, and nothing else takes memory of this machine"
    beside = [f"{term.bytes / 1e9:.2g} GB of {term.name}" for term in device_overhead(scenario)]
    return f"the allocator wastes nothing{'; beside it lie ' if beside else ''}{listed(beside)}"


def largest_assumption(scenario: Scenario, host_share: float | None = None) -> str | None:
    """What of the time model no run has shown for this question; None: no speed is predicted."""
    device = scenario.device
    if device is None:
        return None
    if scenario.constants is not None and scenario.constants.fitted:
        return f"constants of {scenario.constants.origin}"
    if scenario.options.get("offload", "none") != "none" and scenario.torch_device != "cpu":
        rate = default_constants(device).host_bytes_per_second / 1e9
        return f"host memory gives each rank {rate:.0f} GB/s: published steps took 1.9 to 3.2 times as long"
    kept = f"{100 * default_constants(device).sustained_share:.0f} %"
    waits = (
        scenario.job.data.sequence_length < SHORT_TOKENS if host_share is None else host_share > HOST_SHARE
    )
    if waits:
        micro = 1e6 * default_constants(device).dispatch_seconds
        return f"the host takes {micro:.2g} us to start a kernel, which decides steps this short"
    if scenario.job.adapter.is_quantised:
        return "weights of 4 bits are unpacked at the speed of the memory"
    if not any(device.name.startswith(name) for name in SUSTAINED_SHARES):
        return f"training sustains {kept} of the best matmul rate, though no run on {device.name} shows it"
    if scenario.nodes > 1 and scenario.fabric is not None:
        return f"{scenario.fabric.name} gives its line rate to every node at once"
    return f"training sustains {kept} of the best matmul rate of {device.name}"


@cache
def measured_errors() -> tuple[dict[str, Any], ...]:
    """One entry a run: adapted, family, statistic, tokens, memory, speed."""
    found: list[dict[str, Any]] = [
        one for file in (ERRORS, CPU_ERRORS) for one in json.loads(file.read_text())
    ]
    return tuple(found)


def _known(
    runs: Sequence[dict[str, Any]], families: Collection[str], figure: str, *, of: Any
) -> KnownErrors | None:
    with_figure = [run for run in runs if run[figure] is not None]
    own = [run for run in with_figure if run["family"] in families]
    shown = own if len(own) >= ENOUGH else with_figure
    if not shown:
        return None
    errors = [float(run[figure]) for run in shown]
    sizes = [abs(error) for error in errors]
    whose = {"whose": "runs on CPU ranks"} if shown[0]["statistic"] == CPU else {}
    return KnownErrors(runs=len(errors), typical=of(sizes), bias=median(errors), worst=max(sizes), **whose)
