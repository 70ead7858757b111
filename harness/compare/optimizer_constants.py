"""Constants of an optimizer's groups: betas, epsilon, weight decay."""

from __future__ import annotations

from typing import Any

from harness.record import Record

Constants = dict[str, list[str]]
"""Values of each constant by its name, one for each kind of group."""


def optimizer_constants(record: Record) -> list[str] | None:
    """Constants of the optimizer's groups, whatever their order, as the live optimizer holds them."""
    return sorted(_kinds_of_group(record)) or None


def constants_by_name(record: Record) -> Constants:
    """Each constant with its values, in the order of the texts."""
    found: Constants = {}
    for _, group in sorted(_kinds_of_group(record).items()):
        for name, value in group.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return found


def _kinds_of_group(record: Record) -> dict[str, dict[str, str]]:
    """Constants of the optimizer's groups by their text, groups with equal constants once."""
    observed = record.observed.optimizer_groups if record.observed else []
    effective = record.backend.effective
    groups = observed or (effective.optimizer_groups if effective else [])
    return {_joined(constants): constants for group in groups for constants in (_constants(group),)}


def optimizer_groups(record: Record) -> dict[str, str] | None:
    """Constants by parameter; None where it is not known which parameters a group holds."""
    groups = record.observed.optimizer_groups if record.observed else []
    if not groups or any("parameters" not in group for group in groups):
        return None
    return {name: _joined(_constants(group)) for group in groups for name in map(str, group["parameters"])}


def _constants(group: dict[str, Any]) -> dict[str, str]:
    keys = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum")
    return {key: str(group[key]) for key in keys if key in group}


def _joined(constants: dict[str, str]) -> str:
    """'betas [0.9, 0.95], eps 1e-08'."""
    return ", ".join(f"{name} {value}" for name, value in constants.items())
