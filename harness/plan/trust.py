"""How wrong predictions like one have been on runs that others published, and what one rests on most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness.plan.constants import SUSTAINED_SHARES, TimeConstants, default_constants
from harness.plan.scenario import Scenario

ERRORS = Path(__file__).with_name("data") / "published-errors.json"
"""By run, relative, without those that a constant is from; `python -m benchmarks.published` writes it."""
PUBLISHED = TimeConstants.origin
ENOUGH = 10
"""Runs that a family of strategies needs before it is judged by its own alone."""
SHORT_TOKENS = 1024
"""Samples below are steps that wait for the host."""
WORTH_SAYING = 0.05
"""Bias from which a direction is named."""


@dataclass(frozen=True, kw_only=True)
class KnownErrors:
    """Errors of one figure over published runs."""

    runs: int
    typical: float
    """Mean for memory, median for speed, without sign."""
    bias: float
    worst: float

    def text(self) -> str:
        """'±9 % (61 published runs, mostly 10 % too low)'."""
        direction = ""
        if abs(self.bias) >= WORTH_SAYING:
            direction = f", mostly {abs(self.bias):.0%} too {'low' if self.bias < 0 else 'high'}"
        return f"±{self.typical:.0%} ({self.runs} published runs{direction})".replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How wrong answers like one have been."""

    allocated: KnownErrors | None
    reserved: KnownErrors | None
    """Reserved or device memory."""
    speed: KnownErrors | None
    assumption: str | None
    """The largest that the speed rests on."""

    def lines(self) -> list[str]:
        """In words, for people."""
        figures = (("allocated", self.allocated), ("reserved", self.reserved), ("speed", self.speed))
        parts = [f"{name} {known.text()}" for name, known in figures if known is not None]
        found = [f"typical error of such predictions: {', '.join(parts)}"] if parts else []
        return found + ([f"largest assumption: {self.assumption}"] if self.assumption else [])

    def as_json(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            name: vars(known) if known else None
            for name, known in (
                ("allocated", self.allocated), ("reserved", self.reserved), ("speed", self.speed),
            )
        } | {"assumption": self.assumption}  # fmt: skip


def trust_in(scenario: Scenario) -> Trust:
    """Of runs with the same kind of training, and of the same family of strategies if there are enough."""
    adapted, family = scenario.job.adapter.is_present, scenario.strategy.family
    short = scenario.job.data.sequence_length < SHORT_TOKENS
    alike = [run for run in published_errors() if run["adapted"] == adapted]
    memory = {
        kind: _known([run for run in alike if run["statistic"] in kinds], family, "memory", of=mean)
        for kind, kinds in (
            ("allocated", ("allocated", "not said")), ("reserved", ("reserved", "device")),
        )
    }  # fmt: skip
    speeds = [run for run in alike if (run["tokens"] < SHORT_TOKENS) == short]
    on_gpu = scenario.device is not None
    return Trust(
        **memory,
        speed=_known(speeds, family, "speed", of=median) if on_gpu else None,
        assumption=largest_assumption(scenario),
    )


def largest_assumption(scenario: Scenario) -> str | None:
    """What of the time model no run has shown for this question; None: no speed is predicted."""
    device = scenario.device
    if device is None:
        return None
    if scenario.constants is not None and scenario.constants.fitted:
        return f"constants of {scenario.constants.origin}"
    kept = f"{100 * default_constants(device).sustained_share:.0f} %"
    if scenario.job.data.sequence_length < SHORT_TOKENS:
        return "the host starts operators as fast as the GPU computes them, which steps this short disprove"
    if scenario.job.adapter.is_quantised:
        return "weights of 4 bits are unpacked at the speed of the memory"
    if not any(device.name.startswith(name) for name in SUSTAINED_SHARES):
        return f"training sustains {kept} of the best matmul rate, though no run on {device.name} shows it"
    if scenario.nodes > 1 and scenario.fabric is not None:
        return f"{scenario.fabric.name} gives its line rate to every node at once"
    return f"training sustains {kept} of the best matmul rate of {device.name}"


@cache
def published_errors() -> tuple[dict[str, Any], ...]:
    """One entry a run: adapted, family, statistic, tokens, memory, speed."""
    found: list[dict[str, Any]] = json.loads(ERRORS.read_text())
    return tuple(found)


def _known(runs: Sequence[dict[str, Any]], family: str, figure: str, *, of: Any) -> KnownErrors | None:
    with_figure = [run for run in runs if run[figure] is not None]
    own = [run for run in with_figure if run["family"] == family]
    errors = [float(run[figure]) for run in (own if len(own) >= ENOUGH else with_figure)]
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return KnownErrors(runs=len(errors), typical=of(sizes), bias=median(errors), worst=max(sizes))
