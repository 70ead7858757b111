"""What each backend was configured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.judge.wording import ranks
from harness.nested import differences
from harness.record import Record
from harness.report.document import Block, Folded, Paragraph, Section, yaml_code

OBSERVED_SETTINGS = (
    "attention", "activation_checkpointing", "compiled",
    "compiled_graphs", "graph_breaks", "recompilations", "dropout", "tf32", "deterministic",
    "tied_parameters", "frozen_parameters", "parameters_left_out", "master_dtypes", "optimizer_state_dtypes",
)  # fmt: skip
"""What the harness saw of the live model and optimizer, whatever the backend says of itself."""


def configuration_section(comparison: Comparison) -> Section | None:
    """What was in force, folded: of each backend in full once, then what other cells of it change."""
    by_label: dict[tuple[str, str], list[Repeats]] = {}
    for group in comparison.groups:
        if group.record.backend.effective is not None:
            by_label.setdefault((group.record.job_id, group.label), []).append(group)
    blocks = [_folded(groups) for groups in by_label.values()]
    return Section("configuration", "Configuration of each backend", blocks) if blocks else None


def _folded(groups: Sequence[Repeats]) -> Folded:
    first, *others = groups
    settings = _in_force(first.record)
    blocks: list[Block] = [yaml_code(settings)]
    for group in others:
        changed = difference(_in_force(group.record), settings)
        same = f"{group.cell}: as {first.cell}"
        blocks += [Paragraph(f"{same}, but for"), yaml_code(changed)] if changed else [Paragraph(f"{same}.")]
    sizes = dict.fromkeys(ranks(group.world_size) for group in groups)
    return Folded(f"{first.label}, {', '.join(sizes)}", blocks)


def difference(given: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values of `given` that `other` has not, nested; None for what only `other` has."""
    changed: dict[str, Any] = {}
    for keys, value, _ in differences(given, other):
        inner = changed
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return changed


def _in_force(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = {
        "effective": record.backend.in_force(),
        "native_config": record.backend.native_config,
        "versions": record.backend.versions,
    }
    if record.world.dimensions:
        document["dimensions"] = {part.name: part.size for part in record.world.dimensions}
    if record.observed is not None:
        document["observed"] = record.observed.model_dump(
            mode="json", include=set(OBSERVED_SETTINGS), exclude_none=True
        )
    return document
