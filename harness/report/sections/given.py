"""Configuration files of other tools that rows came from: every key, taken or pinned."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.record import GivenPart
from harness.report.document import Block, Paragraph, Section
from harness.report.given import given_table, summary

TEXT = (
    "Rows of this report that have the settings of a configuration file of Accelerate or DeepSpeed. A key is "
    "taken if the run has its value, and pinned if it has another one or if the key has no part in a run. "
    "Keys that no run can have are refused before anything runs."
)


def given_section(comparison: Comparison) -> Section | None:
    """None where no row came from a file."""
    parts: dict[str, tuple[str, GivenPart]] = {}
    for row in comparison.rows:
        part = row.record.backend.given
        if part is not None:
            parts.setdefault(part.model_dump_json(), (row.backend, part))
    if not parts:
        return None
    blocks: list[Block] = [Paragraph(TEXT)]
    for number, (label, part) in enumerate(parts.values(), 1):
        blocks += [Paragraph(f"{summary(label, part)}. SHA-256: {part.sha256}."), given_table(part, number)]
    return Section("given", "Configuration files of other tools", blocks)
