"""Sentences about how much of the communication is hidden, and about prefetch."""

from __future__ import annotations

from typing import Any

from harness.backends.registry import strategy_of
from harness.record import Record
from harness.report.formats import percent

MOSTLY, PARTLY = 0.8, 0.2
"""Shares of hidden communication from which on the words change."""
PREFETCH_SETTINGS = ("forward_prefetch", "backward_prefetch", "limit_all_gathers")
OFF = {"forward_prefetch": (False, 0), "backward_prefetch": ("none", 0)}


def overlap_words(share: float, record: Record) -> str:
    """One or two sentences; `share` of the communication is hidden.

    Prefetch is mentioned if the backend gathers weights and can do so ahead.
    """
    text = f"{percent(share)} of the communication is hidden: "
    if share >= MOSTLY:
        text += "it overlaps with computation."
    elif share >= PARTLY:
        text += "overlap works partly."
    else:
        text += "ranks wait for it."
    about_prefetch = _prefetch(share, record)
    return f"{text} {about_prefetch}" if about_prefetch else text


def _prefetch(share: float, record: Record) -> str | None:
    """A sentence about prefetch; None if the backend gathers nothing ahead."""
    strategy = strategy_of(record.backend.name)
    effective = record.backend.effective
    details = effective.details if effective else {}
    if strategy is None:
        return None
    if strategy.zero_stage == 3:
        ahead = effective.prefetch if effective else None
        if ahead in (None, "none") and record.world.preset == "like-for-like":
            return "Prefetch is off: the preset like-for-like sets max_live_parameters to 0."
        if ahead is None:
            return None
        return "Prefetch is off." if ahead == "none" else f"{_judge(share)} (in force: up to {ahead} ahead)."
    if not strategy.of_family.overlaps_on_streams:
        return None
    if record.world.device == "cpu":
        return (
            "What overlap or prefetch could hide cannot be measured on this machine: FSDP overlaps on "
            f"streams of a device, and the CPU has none{_settings(details)}."
        )
    if strategy.sharding == "none":
        return None
    if all(details.get(setting) in values for setting, values in OFF.items()):
        return f"Prefetch is off{_settings(details)}."
    return f"{_judge(share)}{_settings(details)}."


def _judge(share: float) -> str:
    if share >= MOSTLY:
        return "Prefetch works"
    return "Prefetch works partly" if share >= PARTLY else "Prefetch does not help"


def _settings(details: dict[str, Any]) -> str:
    """Prefetch settings in force, as the backend read them back."""
    known = [f"{name} {details[name]}" for name in PREFETCH_SETTINGS if name in details]
    return f" (in force: {', '.join(known)})" if known else ""
