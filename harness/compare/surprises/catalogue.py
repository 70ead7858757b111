"""Every surprise of a comparison; a new kind is a function of a cell and an entry here."""

from __future__ import annotations

from collections.abc import Callable

from harness.backends import registry
from harness.compare.comparison import Comparison
from harness.compare.repeats import Repeats
from harness.compare.surprises import states, traffic, training
from harness.compare.surprises.surprise import Sighting, Surprise, merged
from harness.spec import Question

RULES: tuple[Callable[[Repeats], list[Sighting]], ...] = (training.find, traffic.find, states.find)


def surprises(comparison: Comparison, question: Question = "all") -> list[Surprise]:
    """Those that bear on the question, costs first and savings last; only of built-in backends.

    What a third party's backend does differently is not a library's: it is a finding or its own matter.
    """
    found = merged(
        (group, sighting)
        for group in comparison.groups
        if registry.strategy_of(group.record.backend.name) is not None
        for rule in RULES
        for sighting in rule(group)
    )
    return [s for s in found if question == "all" or question in s.behaviour.questions]
