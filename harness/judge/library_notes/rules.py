"""All that the records of a comparison show of libraries and transports."""

from __future__ import annotations

from collections.abc import Callable

from harness.backends import registry
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.library_notes.note import CellNote, ReportNote, merged
from harness.judge.library_notes.states import find_in_states
from harness.judge.library_notes.traffic import find_in_traffic
from harness.judge.library_notes.training import find_in_training
from harness.judge.rows import CellRuns

RULES: tuple[Callable[[CellRuns], list[CellNote]], ...] = (find_in_training, find_in_traffic, find_in_states)


def library_notes(comparison: Comparison, question: ReportFocus = "all") -> list[ReportNote]:
    """Those that bear on the question, costs first and savings last; only of built-in backends.

    What a third party's backend does differently is not a library's: it is a finding or its own matter.
    """
    found = merged(
        (group, cell_note)
        for group in comparison.groups
        if registry.strategy_of(group.record.backend.name) is not None
        for rule in RULES
        for cell_note in rule(group)
    )
    return [s for s in found if question == "all" or question in s.library_note.questions]
