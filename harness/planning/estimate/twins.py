"""Strategies through Accelerate or Trainer whose figures all equal those of the native one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from harness.backends.strategy import ROUTE_PREFIXES
from harness.planning.estimate.row import EstimateRow

NAMES = frozenset({"label", "scenario"})
"""What of a row is no figure."""


def without_twins(rows: Sequence[EstimateRow]) -> tuple[list[EstimateRow], dict[str, str]]:
    """The rows to show, and the label of each left out -> the native label whose figures it has."""
    by_label = {row.label: row for row in rows}
    twins = {label: native for label in by_label if (native := _native(label, by_label)) is not None}
    return [row for row in rows if row.label not in twins], twins


def twins_line(twins: Mapping[str, str]) -> str:
    """'accelerate-ddp as ddp, accelerate-fsdp as fsdp: the same in all figures'."""
    return ", ".join(f"{label} as {native}" for label, native in twins.items()) + ": the same in all figures"


def _native(label: str, by_label: Mapping[str, EstimateRow]) -> str | None:
    for prefix in ROUTE_PREFIXES:
        name = label.removeprefix(prefix)
        other = by_label.get(name) if name != label else None
        if other is not None and _figures(other) == _figures(by_label[label]):
            return name
    return None


def _figures(row: EstimateRow) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row) if field.name not in NAMES}
