"""How the cells ended and whether they trained the same model, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends.registry import PLANTED
from harness.judge.cell import Cell, name_cells
from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.judge.wording import listed
from harness.report.formats import percent, scientific
from harness.report.short.words import sentence

NORM = "max_grad_norm_difference"
MOST_NAMES = 6
"""Of backends in a list."""
ENDINGS = (
    ("oom", "ran out of memory", "ran out of memory"),
    ("failed", "failed", "failed"),
    ("timeout", "ran out of time", "ran out of time"),
    ("diverged", "has a loss or norm of NaN or infinity", "have a loss or norm of NaN or infinity"),
    ("unsupported", "is unsupported here", "are unsupported here"),
)
"""Status, and what is written of one and of several cells that have it."""


def endings_sentence(comparison: Comparison) -> str:
    """How many cells completed, how the others ended, and what is compared with nothing."""
    return sentence(*_endings(comparison.comparable.groups), *_excluded(comparison.not_comparable.groups))


def parity_sentence(comparison: Comparison) -> str:
    """Agreement with the reference of everything but itself; empty where the reference ran alone."""
    others = [group for group in comparison.comparable.groups if not group.is_reference]
    judged = [group for group in others if group.parity != "unjudged"]
    if not judged:
        return "No loss could be compared with a reference." if others else ""
    off = [group for group in judged if group.parity == "diverged"]
    return sentence(*_agreement(judged), *_divergence(off), *_unjudged(others))


def _endings(groups: Sequence[Repeats]) -> list[str]:
    if not groups:
        return []
    succeeded = sum(group.succeeded for group in groups)
    if len(groups) == 1:
        end = "completed" if succeeded else f"did not complete: {groups[0].status}"
        return [f"the only configuration, {groups[0].cell}, {end}"]
    number = f"{succeeded or 'none'} of {len(groups)}"
    if succeeded == len(groups):
        number = "both" if succeeded == 2 else f"all {succeeded}"
    parts = [f"{number} configurations completed"]
    for status, of_one, of_several in ENDINGS:
        cells = [g.cell for g in groups if any(row.record.status == status for row in g.rows)]
        if cells:
            ended = of_one if len(cells) == 1 else of_several
            parts.append(f"{len(cells)} {ended} ({_where(cells)})")
    planted = list(dict.fromkeys(g.label for g in groups if g.record.backend.name in PLANTED))
    verb = "is" if len(planted) == 1 else "are"
    return [", ".join(parts), *([f"{listed(planted)} {verb} deliberately faulty"] if planted else [])]


def _where(cells: Sequence[Cell]) -> str:
    """One cell with its ranks, of several the backends."""
    if len(cells) == 1:
        return str(cells[0])
    return listed(list(dict.fromkeys(cell.label for cell in cells)), MOST_NAMES)


def _agreement(judged: Sequence[Repeats]) -> list[str]:
    agree = [group for group in judged if group.parity != "diverged"]
    if not agree:
        return []
    largest = max((group.figures["max_loss_difference"] or 0.0 for group in agree), default=0.0)
    extent = f"within {scientific(largest)} nats per token" if largest else "bit for bit"
    number = f"all {len(judged)}" if len(agree) == len(judged) else f"{len(agree)} of {len(judged)}"
    judgement = f"{number} judged configurations train"
    if len(judged) == 1:
        judgement = "the one judged configuration trains"
    return [f"{judgement} the same model as one process: losses agree {extent}"]


def _divergence(off: Sequence[Repeats]) -> list[str]:
    if not off:
        return []
    measures = (("loss", "max_loss_difference", scientific), ("gradient norm", NORM, percent))
    parts = [
        f"{name} by up to {show(max(found))}"
        for name, key, show in measures
        if (found := [value for group in off if (value := group.figures[key])])
    ]
    extent = f" ({', '.join(parts)})" if parts else ""
    cells = name_cells([group.cell for group in off], MOST_NAMES)
    return [f"{cells} {'diverges' if len(off) == 1 else 'diverge'}{extent}"]


def _unjudged(others: Sequence[Repeats]) -> list[str]:
    cells = [group.cell for group in others if group.parity == "unjudged" and group.succeeded]
    return [f"{name_cells(cells, MOST_NAMES)} could not be judged"] if cells else []


def _excluded(groups: Sequence[Repeats]) -> list[str]:
    if not groups:
        return []
    cells = name_cells([group.cell for group in groups], MOST_NAMES)
    return [f"not comparable: {cells} ran a different job"]
