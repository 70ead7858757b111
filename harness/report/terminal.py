"""What a terminal says below the table: findings, and where they and differing settings are read."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.findings.catalogue import find_all
from harness.compare.findings.groups import DOCUMENT, statements
from harness.compare.rows import Row
from harness.compare.settings_in_force import differing_settings
from harness.report.sections.settings import TITLE


def finding_lines(rows: Sequence[Row]) -> list[str]:
    """One line for what each kind of finding says, causes first."""
    return [f"finding {statement.id}: {statement.sentence}" for statement in statements(find_all(rows))]


def where_to_read(rows: Sequence[Row]) -> list[str]:
    """For the person who watches: where findings are explained, and how many settings differ."""
    lines = []
    if find_all(rows):
        lines.append(f"findings are explained, with the remedy of each, in {DOCUMENT}#ID and in the report")
    settings = differing_settings(rows)
    if settings:
        deep = sum(setting.effect == "mathematics" for setting in settings)
        lines.append(
            f"settings in force that differ: {len(settings)}, of them {deep} that change the mathematics; "
            f"--json has them under 'settings', a report under '{TITLE}'"
        )
    return lines
