"""A part of a predicted time, with its formula and source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """A part of a step's time."""

    name: str
    seconds: float
    formula: str
    source: str
