"""The verdict: three to six sentences that answer the question, each with where its evidence is."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.findings.catalogue import kinds
from harness.judge.findings.groups import statements
from harness.judge.wording import counted, listed
from harness.report.document import Items, Line, Section
from harness.report.short.budget import shortened
from harness.report.short.memory_words import memory_sentence
from harness.report.short.parity_words import endings_sentence, parity_sentence
from harness.report.short.scaling_words import scaling_sentences
from harness.report.short.speed_words import speed_sentence
from harness.report.short.stage import stage
from harness.report.short.traffic_words import traffic_sentence
from harness.spec import Question

PARTS: dict[Question, tuple[str, ...]] = {
    "all": ("parity", "memory", "speed", "traffic"),
    "speed": ("speed", "parity", "traffic"),
    "memory": ("memory", "parity"),
    "footprint": ("memory", "traffic", "parity"),
    "parity": ("cause", "parity"),
    "scaling": ("scaling", "parity"),
}
"""What is answered, the answer first."""
MOST_WARNINGS = 6
MOST_WORDS = 40
"""Of a finding that opens the verdict."""
NOT_SCALED = "No backend ran timed on several numbers of ranks, so there is no scaling to state."
NOTHING_RAN = "No configuration completed, so there is nothing to compare."


def verdict_section(comparison: Comparison, question: Question) -> Section:
    """What a reader should take away."""
    lines = [line for part in PARTS[question] for line in _part(comparison, part)]
    if stage(comparison) is None:
        lines.append(Line(NOTHING_RAN))
    elif question != "scaling":
        lines.append(Line(_one_of_several(comparison)))
    lines += [Line(endings_sentence(comparison), details="results")]
    lines += [Line(_warnings(comparison), details="findings")]
    return Section("verdict", "Verdict", [Items([line for line in lines if line.text])])


def _part(comparison: Comparison, part: str) -> list[Line]:
    where = stage(comparison)
    match part:
        case "parity":
            return [Line(parity_sentence(comparison), details="levels" if comparison.noises else "results")]
        case "cause":
            return [Line(text, details="findings") for text in _cause(comparison)]
        case "memory" if where is not None:
            return [Line(memory_sentence(where), details="results")]
        case "speed" if where is not None:
            return [Line(speed_sentence(where), details="results")]
        case "traffic" if where is not None:
            sent = traffic_sentence(where)
            return [Line(sent, details="communication_volume")] if sent else []
        case "scaling":
            found = scaling_sentences(comparison)
            return [Line(text, details="scaling") for text in found] or [Line(NOT_SCALED)]
    return []


def _one_of_several(comparison: Comparison) -> str:
    """Which job the figures are of; empty where all runs are one job."""
    jobs, where = comparison.comparable.by_job, stage(comparison)
    if len(jobs) == 1 or where is None:
        return ""
    return f"Figures above are of job {where.place[0]}, one of {len(jobs)}; results show all."


def _cause(comparison: Comparison) -> list[str]:
    """The finding that explains why losses differ, the one of a run that diverged first, and its cause."""
    merged = statements(comparison.findings)
    diverged = {cell for found in merged if found.id == "diverged" for cell in found.cells}
    causes = [found for found in merged if found.role == "cause"]
    causes.sort(key=lambda cause: diverged.isdisjoint(cause.cells))
    if not causes:
        return ["No cause of a difference was found."] if diverged else []
    first = causes[0]
    return [
        f"{shortened(first.sentence.removesuffix('.'), MOST_WORDS)}.",
        f"Cause: {kinds()[first.id].cause}",
    ]


def _warnings(comparison: Comparison) -> str:
    """How many kinds of findings there are, by name."""
    found = list(dict.fromkeys(statement.id for statement in statements(comparison.findings)))
    if found:
        return f"{counted(len(found), 'warning')}: {listed(found, MOST_WARNINGS)}."
    groups = comparison.groups
    if any(group.parity != "unjudged" for group in groups if not group.is_reference):
        return "No warnings."
    return "No warnings, but no run could be compared with a reference."
