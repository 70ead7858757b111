"""How to make the same runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from harness.backends.registry import REFERENCE
from harness.judge.comparison import Comparison
from harness.judge.rows import JudgedRun
from harness.judge.wording import listed
from harness.record import Record
from harness.safe_text import by_name
from harness.tell.document import Block, Code, Folded, Paragraph, Section, yaml_code
from harness.tell.tables import prose

WHERE = "In a checkout of the code:"
INSTALL = "pip install -c constraints.txt -e '.[train]'"


def reproduce_section(comparison: Comparison) -> Section:
    """Code, commands, each once and without folders of the machine that ran them, and configurations."""
    records = [row.record for row in comparison.rows]
    commands = commands_of(comparison)
    files = _configurations(comparison)
    blocks: list[Block] = [
        Paragraph(" ".join([*_commits(records), *_builds(records), WHERE])),
        Code("sh", "\n".join([INSTALL, *commands])),
        Paragraph(prose("reproduce_configuration")),
        *(Folded(title, [yaml_code(settings)]) for title, settings in files.items()),
    ]
    return Section("reproduce", "How to reproduce", blocks)


def commands_of(comparison: Comparison) -> list[str]:
    """Each command that asked for runs, without folders of the machine that ran them."""
    return list(dict.fromkeys(shlex.join(by_name(row.record.command)) for row in comparison.rows))


def _commits(records: Sequence[Record]) -> list[str]:
    """The commits that the runs came from, in a sentence; [] where no record knows one."""
    states = [record.environment.git for record in records]
    commits = dict.fromkeys(state.commit for state in states if state)
    return [f"The code is that of commit {listed(list(commits))}."] if commits else []


def _builds(records: Sequence[Record]) -> list[str]:
    """Of which build torch was, where its version says so: pip takes the one that its index offers."""
    versions = dict.fromkeys(record.environment.packages.get("torch", "") for record in records)
    builds = [version for version in versions if "+" in version]
    return (
        [f"torch was the build {listed(builds)}; pip installs the one that its index offers."]
        if builds
        else []
    )


def _configurations(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Title and content of a configuration file for each job, cut of its batch and way of measuring.

    A reference is added to every comparison, cut in its own way: it counts where nothing else ran.
    """
    others = {row.record.job_id for row in comparison.rows if row.record.backend.name != REFERENCE}
    found: list[tuple[dict[str, Any], list[JudgedRun]]] = []
    # A row that names its own preset belongs to the file of those that do not.
    for row in sorted(comparison.rows, key=lambda row: row.record.backend.own_preset is not None):
        record = row.record
        if record.backend.name == REFERENCE and record.job_id in others:
            continue
        world = record.world
        settings = record.job.model_dump(mode="json")
        settings["training"]["accumulation_steps"] = world.accumulation_steps
        if record.measure:
            settings["measure"] = record.measure.model_dump(mode="json")
        settings["runtime"] = {"preset": world.preset, "device": world.device}
        known = next((alike for other, alike in found if _holds(other, settings, record)), None)
        if known is None:
            found.append((settings, known := []))
        known.append(row)
    return {
        f"Configuration{f' {number} of {len(found)}' if len(found) > 1 else ''}": _with_cells(settings, alike)
        for number, (settings, alike) in enumerate(found, 1)
    }


def _holds(file: dict[str, Any], settings: dict[str, Any], record: Record) -> bool:
    """Whether a file that holds some cells can hold the one of this record too."""
    if record.backend.own_preset is not None:
        settings = {**settings, "runtime": {**settings["runtime"], "preset": file["runtime"]["preset"]}}
    return file == settings


def _with_cells(settings: dict[str, Any], rows: Sequence[JudgedRun]) -> dict[str, Any]:
    """Settings with the threads that all runs share, and with the cells where one node held them."""
    worlds = [row.record.world for row in rows]
    threads = {world.threads_per_rank for world in worlds}
    runtime = {**settings["runtime"], **({"threads_per_rank": threads.pop()} if len(threads) == 1 else {})}
    if any(world.nodes > 1 for world in worlds):
        return {**settings, "runtime": runtime}
    cells = {
        "backends": list(dict.fromkeys(row.backend for row in rows)),
        "world_sizes": sorted({world.world_size for world in worlds}),
        "repeats": max(row.record.repeat for row in rows) + 1,
    }
    return {**settings, "runtime": runtime, "compare": cells}
