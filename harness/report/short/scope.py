"""On what it was measured, and which figures carry over to other machines."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.comparison import Comparison
from harness.judge.wording import listed
from harness.record import WorldPart
from harness.report.document import Line, Section
from harness.report.short.title import job_words, rank_words
from harness.spec import Question

LIBRARIES = ("torch", "deepspeed")
ON_STUB = (
    "bytes, states and parity carry over to GPUs; no kernel ran on one, so peaks lack what kernels allocate "
    "and speeds mean nothing"
)
ON_CPU = "bytes, states and parity carry over to GPUs, peaks and speeds do not"


def scope_section(comparison: Comparison, question: Question) -> Section | None:
    """One line; None without runs."""
    if not comparison.rows:
        return None
    worlds = [row.record.world for row in comparison.rows]
    transports = listed(list(dict.fromkeys(world.collectives for world in worlds)))
    known = dict.fromkeys(row.record.job.training.precision for row in comparison.rows)
    precisions = listed([precision for precision in known if precision is not None])
    facts = [f"{rank_words(comparison)} over {transports}", job_words(comparison), precisions]
    facts += [_preset(worlds), _versions(comparison), _runs(comparison)]
    text = ", ".join(fact for fact in facts if fact)
    if any(row.record.on_stub for row in comparison.rows):
        text += f": {ON_STUB}"
    elif any(world.device == "cpu" for world in worlds):
        text += f": {ON_CPU}"
    return Section("scope", "Scope", [Line(f"{text}.", details="machine")])


def _preset(worlds: Sequence[WorldPart]) -> str:
    """'preset like-for-like'; empty where runs differ in it."""
    presets = {world.preset for world in worlds}
    return f"preset {presets.pop()}" if len(presets) == 1 else ""


def _versions(comparison: Comparison) -> str:
    """'torch 2.13.0, deepspeed 0.19.8'; of libraries that all runs had in one version."""
    found = []
    for name in LIBRARIES:
        versions = {row.record.environment.packages.get(name) for row in comparison.rows}
        if len(versions) == 1 and (version := versions.pop()):
            found.append(f"{name} {version.partition('+')[0]}")
    return ", ".join(found)


def _runs(comparison: Comparison) -> str:
    """'7 runs of each cell', '3 to 7 runs of each cell'."""
    counts = sorted({len(group.rows) for group in comparison.groups})
    if counts == [1]:
        return "one run of each cell"
    least, most = counts[0], counts[-1]
    return f"{most} runs of each cell" if least == most else f"{least} to {most} runs of each cell"
