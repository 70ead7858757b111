"""What makes a comparison unfair or a run wrong, by name."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness.compare.findings.catalogue import find_all
from harness.compare.rows import Row
from harness.report.document import Items, Paragraph, Section


def findings_section(rows: Sequence[Row]) -> Section:
    """Every finding with its values, or that there is none."""
    found = find_all(rows)
    if not found:
        text = "None: every judged run is the same job as its reference and agrees with it."
        return Section("findings", "Findings", [Paragraph(text)])
    lines = [
        (finding.id, f"{finding.message} ({json.dumps(finding.values, ensure_ascii=False)})")
        for finding in found
    ]
    return Section("findings", "Findings", [Items(lines)])
