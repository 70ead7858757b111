"""How to make the same runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.command_lines import by_name
from harness.compare.rows import Row
from harness.report.document import Block, Code, Paragraph, Section

ELSEWHERE = (
    "A configuration file was given by an absolute path, of which only the name is shown: its settings of "
    "the job are in the YAML of the job above."
)


def reproduce_section(rows: Sequence[Row]) -> Section:
    """The commands that made the records, each once, without folders of the machine that ran them."""
    commands = list(dict.fromkeys(shlex.join(by_name(row.record.command)) for row in rows))
    blocks: list[Block] = [Code("sh", "\n".join(commands))]
    if any(by_name(row.record.command) != row.record.command for row in rows):
        blocks.append(Paragraph(ELSEWHERE))
    return Section("reproduce", "How to reproduce", blocks)
