"""Predicted time of a step: computing, communication, and what of it stays exposed."""

from __future__ import annotations

from dataclasses import dataclass

from harness.planning.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """A part of a step's time."""

    name: str
    seconds: float
    formula: str
    source: str


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """One optimizer step of the slowest rank."""

    computing: tuple[TimeTerm, ...]
    communication: tuple[TimeTerm, ...]
    exposed_seconds: float
    """What of the communication does not hide behind computing."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_utilization: float | None
    """Of the device's dense peak for the compute dtype, 0 to 1."""
    joules_per_step: float | None
    """Of all devices."""


def predict_speed(scenario: Scenario) -> SpeedPrediction | None:
    """Predict a step; None without a device."""
    return None
