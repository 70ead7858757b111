"""The verdict: three to six plain sentences for each job, computed from its rows."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends.registry import PLANTED
from harness.compare.cell import name_cells
from harness.compare.comparison import Comparison
from harness.compare.findings.finding import Finding
from harness.compare.findings.groups import statements
from harness.compare.repeats import Repeats, place_to_compare
from harness.compare.wording import counted, listed
from harness.report.document import Block, Items, Paragraph, Section
from harness.report.formats import scientific
from harness.report.sections.verdict_measures import (
    communication,
    memory,
    not_alike,
    speed,
    speed_of_one_process,
)

MOST_JOBS = 4
"""Beyond these the verdict would be longer than the tables it sums up."""
NOTHING_JUDGED = "no warnings, but no run could be compared with a reference"
NO_FINDING = "no warnings"
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


def verdict_section(comparison: Comparison) -> Section:
    """What a reader should take away."""
    jobs = comparison.comparable.by_job
    excluded = _excluded(comparison.not_comparable.groups)
    if len(jobs) == 1:
        (own,) = jobs.values()
        first, *others = _clauses(own.groups, comparison.findings)
        lines = [_sentence(*clauses) for clauses in ([*first, *excluded], *others)]
        return Section("verdict", "Verdict", [Items(lines)])
    warnings = _findings(comparison.findings)
    blocks: list[Block] = [
        Items(
            [
                (f"Job {job_id}", " ".join(sentences(own, None)))
                for job_id, own in list(jobs.items())[:MOST_JOBS]
            ]
        ),
        *(Paragraph(_sentence(*clauses)) for clauses in (excluded, warnings) if clauses),
    ]
    if len(jobs) > MOST_JOBS:
        rest = f"The other {len(jobs) - MOST_JOBS} of {len(jobs)} jobs are in the tables below."
        blocks.append(Paragraph(rest))
    return Section("verdict", "Verdict", blocks)


def sentences(comparison: Comparison, found: Sequence[Finding] | None) -> list[str]:
    """Three to six sentences of one job: what fits, what is fastest, what it costs, whether losses agree.

    The last one names what was found; None leaves it out.
    """
    return [_sentence(*clauses) for clauses in _clauses(comparison.groups, found)]


def _clauses(groups: Sequence[Repeats], found: Sequence[Finding] | None) -> list[list[str]]:
    """The clauses of each sentence."""
    place = place_to_compare(groups)
    measured = [["no successful cell has timed steps, so there is no speed to compare"]]
    if place is not None:
        size, timed = place[1], [g for g in groups if g.place == place and g.succeeded]
        same = [g for g in timed if g.parity != "diverged"] or timed
        among = "" if len(same) == len(timed) else " among the cells that did not diverge"
        elsewhere = any(g.world_size == size and g.place != place and g.step_seconds for g in groups)
        ranked = [g for g in same if not g.is_reference] or same
        fastest = not_alike(size) if elsewhere and len(same) == 1 else speed(ranked, size, among)
        measured = [
            [fastest, *speed_of_one_process(groups, size)] if fastest else [],
            memory(same),
            communication(same),
        ]
    is_judged = any(g.parity != "unjudged" for g in groups if not g.is_reference)
    last = [] if found is None else _findings(found, is_judged=is_judged)
    return [clauses for clauses in (_endings(groups), *measured, _losses(groups), last) if clauses]


def _sentence(*clauses: str) -> str:
    """Clauses as one sentence."""
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


def _endings(groups: Sequence[Repeats]) -> list[str]:
    """How many cells succeeded, and how the others ended."""
    succeeded = sum(group.succeeded for group in groups)
    if len(groups) == 1:
        end = "succeeded" if succeeded else f"did not succeed: {groups[0].status}"
        return [f"the only cell, {groups[0].cell}, {end}"]
    number = f"{succeeded or 'none'} of {len(groups)}"
    if succeeded == len(groups):
        number = "both" if succeeded == 2 else f"all {succeeded}"
    parts = [f"{number} cells (backend and number of ranks) succeeded"]
    for status, of_one, of_several in ENDINGS:
        cells = [g.cell for g in groups if any(row.record.status == status for row in g.rows)]
        if cells:
            ended = of_one if len(cells) == 1 else of_several
            parts.append(f"{len(cells)} {ended} ({name_cells(cells, MOST_NAMES)})")
    planted = [g.label for g in groups if g.record.backend.name in PLANTED]
    on_purpose = [f"{listed(list(dict.fromkeys(planted)))}: wrong on purpose"] if planted else []
    return [", ".join(parts), *on_purpose]


def _losses(groups: Sequence[Repeats]) -> list[str]:
    """Agreement of everything but the reference itself."""
    others = [g for g in groups if not g.is_reference]
    judged = [g for g in others if g.parity != "unjudged"]
    if not judged:
        return ["no loss could be compared with a reference"] if others else []
    off = [g.cell for g in judged if g.parity == "diverged"]
    agree = [g for g in judged if g.parity != "diverged"]
    largest = max((g.figures["max_loss_difference"] or 0.0 for g in agree), default=0.0)
    text = (
        f"{len(agree)} of {len(judged)} judged cells match the reference in loss, gradient norm and weights"
    )
    if agree:
        losses = f"within {scientific(largest)} nats per token" if largest else "bit for bit"
        text += f" (losses {losses})"
    clauses = [text]
    if off:
        clauses.append(f"{name_cells(off, MOST_NAMES)} {'diverges' if len(off) == 1 else 'diverge'}")
    unjudged = [g.cell for g in others if g.parity == "unjudged" and g.succeeded]
    if unjudged:
        clauses.append(f"{name_cells(unjudged, MOST_NAMES)} could not be judged")
    return clauses


def _excluded(groups: Sequence[Repeats]) -> list[str]:
    """Runs that were left out of everything above; empty if there are none."""
    cells = [group.cell for group in groups]
    if not cells:
        return []
    return [
        f"excluded: {name_cells(cells, MOST_NAMES)} ran a different job; 'Not comparable' below names "
        "the fields that differ"
    ]


def _findings(found: Sequence[Finding], *, is_judged: bool = True) -> list[str]:
    """What was found, first the cause by which a run diverged."""
    merged = statements(found)
    names = list(dict.fromkeys(statement.id for statement in merged))
    if not names:
        return [NO_FINDING if is_judged else NOTHING_JUDGED]
    causes = [statement for statement in merged if statement.role == "cause"]
    diverged = {cell for statement in merged if statement.id == "diverged" for cell in statement.cells}
    # Of several causes the one that made a run diverge comes first.
    causes.sort(key=lambda cause: diverged.isdisjoint(cause.cells))
    first = [f"first cause: {cause.sentence}" for cause in causes[:1]]
    return [f"{counted(len(names), 'warning')}: {listed(names)}", *first]
