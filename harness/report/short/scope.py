"""On what it was measured, and which figures carry over to other machines."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.wording import listed
from harness.report.document import Line, Section
from harness.report.short.title import job_words, rank_words
from harness.spec import Question

ON_CPU = "bytes, states and parity carry over to GPUs, speeds do not"


def scope_section(comparison: Comparison, question: Question) -> Section | None:
    """One line; None without runs."""
    if not comparison.rows:
        return None
    worlds = [row.record.world for row in comparison.rows]
    transports = listed(list(dict.fromkeys(world.collectives for world in worlds)))
    precisions = listed(list(dict.fromkeys(row.record.job.training.precision for row in comparison.rows)))
    text = f"{rank_words(comparison)} over {transports}, {job_words(comparison)}, {precisions}"
    if any(world.device == "cpu" for world in worlds):
        text += f": {ON_CPU}"
    return Section("scope", "Scope", [Line(f"{text}.", details="machine")])
