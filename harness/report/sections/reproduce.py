"""How to make the same runs again, and what each backend was configured with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.report.document import Code, Folded, Section, yaml_code
from harness.report.formats import ranks

OBSERVED_SETTINGS = (
    "attention", "activation_checkpointing", "compiled", "dropout", "tf32", "deterministic",
    "tied_parameters", "frozen_parameters", "parameters_left_out", "master_dtypes", "optimizer_state_dtypes",
)  # fmt: skip
"""What the harness saw of the live model and optimizer, whatever the backend says of itself."""


def reproduce_section(rows: Sequence[Row]) -> Section:
    """The commands that made the records, each once."""
    commands = list(dict.fromkeys(shlex.join(row.record.command) for row in rows))
    return Section("reproduce", "How to reproduce", [Code("sh", "\n".join(commands))])


def configuration_section(rows: Sequence[Row]) -> Section | None:
    """What was in force for each backend and world size, folded."""
    blocks = []
    for group in group_repeats(rows):
        record = group.record
        if record.backend.effective is None:
            continue
        document = {
            "effective": record.backend.effective,
            "native_config": record.backend.native_config,
            "versions": record.backend.versions,
        }
        if record.observed is not None:
            document["observed"] = record.observed.model_dump(
                mode="json", include=set(OBSERVED_SETTINGS), exclude_none=True
            )
        title = f"{record.backend.label}, {ranks(record.world.world_size)}"
        blocks.append(Folded(title, [yaml_code(document)]))
    return Section("configuration", "Configuration of each backend", blocks) if blocks else None
