"""How to make the same runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.compare.rows import Row
from harness.report.document import Code, Section


def reproduce_section(rows: Sequence[Row]) -> Section:
    """The commands that made the records, each once."""
    commands = list(dict.fromkeys(shlex.join(row.record.command) for row in rows))
    return Section("reproduce", "How to reproduce", [Code("sh", "\n".join(commands))])
