"""How to make the same runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from backends.registry import REFERENCE
from harness.command_lines import by_name
from harness.compare.rows import Row
from harness.compare.wording import listed
from harness.record import Record
from harness.report.document import Block, Code, Folded, Paragraph, Section, yaml_code

WHERE = "In a checkout of the code:"
INSTALL = "pip install -c constraints.txt -e ."
CONFIGURATION = (
    "The jobs and how they were measured, as files for --config. Backends, ranks and repeats stand in the "
    "commands, threads per rank under 'Layout and measurement' (runtime.threads_per_rank). A file that a "
    "command names by --site describes a cluster and is not part of a record."
)


def reproduce_section(rows: Sequence[Row]) -> Section:
    """Code, commands, each once and without folders of the machine that ran them, and configurations."""
    records = [row.record for row in rows]
    commands = list(dict.fromkeys(shlex.join(by_name(record.command)) for record in records))
    files = _configurations(records)
    blocks: list[Block] = [
        Paragraph(" ".join([*_commits(records), WHERE])),
        Code("sh", "\n".join([INSTALL, *commands])),
        Paragraph(CONFIGURATION),
        *(Folded(title, [yaml_code(settings)]) for title, settings in files.items()),
    ]
    return Section("reproduce", "How to reproduce", blocks)


def _commits(records: Sequence[Record]) -> list[str]:
    """The commits that the runs came from, in a sentence; [] where no record knows one."""
    states = [record.environment.get("git") for record in records]
    commits = dict.fromkeys(state["commit"] for state in states if state)
    return [f"The code is that of commit {listed(list(commits))}."] if commits else []


def _configurations(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Title and content of a configuration file for each job, cut of its batch and way of measuring.

    A reference is added to every comparison, cut in its own way: it counts where nothing else ran.
    """
    others = {record.job_id for record in records if record.backend.name != REFERENCE}
    found: list[dict[str, Any]] = []
    for record in records:
        if record.backend.name == REFERENCE and record.job_id in others:
            continue
        world = record.world
        accumulation = (
            {"accumulation_steps": world.accumulation_steps} if world.accumulation_steps > 1 else {}
        )
        settings = {**record.job, "training": {**record.job["training"], **accumulation}}
        if record.measure:
            settings["measure"] = record.measure
        settings["runtime"] = {"preset": world.preset, "device": world.device}
        if settings not in found:
            found.append(settings)
    return {
        f"Configuration{f' {number} of {len(found)}' if len(found) > 1 else ''}": settings
        for number, settings in enumerate(found, 1)
    }
