"""All that the records of a comparison show of libraries and transports."""

from __future__ import annotations

from collections.abc import Callable

from harness.backends import registry
from harness.job.experiment import Question
from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.judge.surprises.states import find_in_states
from harness.judge.surprises.surprise import Sighting, Surprise, merged
from harness.judge.surprises.traffic import find_in_traffic
from harness.judge.surprises.training import find_in_training

RULES: tuple[Callable[[Repeats], list[Sighting]], ...] = (find_in_training, find_in_traffic, find_in_states)


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
