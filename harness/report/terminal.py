"""What a terminal says below the table: findings, and where they and differing settings are read."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.findings.groups import statements
from harness.report.sections.settings import TITLE


def finding_lines(comparison: Comparison) -> list[str]:
    """One line for what each kind of finding says, causes first."""
    return [f"finding {statement.id}: {statement.sentence}" for statement in statements(comparison.findings)]


def where_to_read(comparison: Comparison) -> list[str]:
    """For the person who watches: where findings are explained, and how many settings differ."""
    lines = []
    if comparison.findings:
        lines.append("`harness explain ID` has cause and fix of a finding, as the report has")
    settings = comparison.settings
    if settings:
        deep = sum(setting.effect == "mathematics" for setting in settings)
        lines.append(
            f"settings in force that differ: {len(settings)}, of them {deep} that change the mathematics; "
            f"--json has them under 'settings', a report under '{TITLE}'"
        )
    return lines
