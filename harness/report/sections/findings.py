"""What makes a comparison unfair or a run wrong, by name: causes first, then what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.compare.findings.catalogue import find_all, kinds
from harness.compare.findings.finding import Finding
from harness.compare.findings.groups import DOCUMENT, ROLES, Statement, statements
from harness.compare.rows import Row
from harness.compare.wording import words
from harness.report.document import Block, Column, Folded, Heading, Items, Paragraph, Section, Table
from harness.report.formats import listed, milliseconds, percent

COLUMNS = (
    Column("finding", "finding", align="left"),
    Column("backends", "backends", align="left"),
    Column("figure", "figure", align="left"),
    Column("value", "value", align="left"),
)
UNITS = {
    "_bytes": lambda value: f"{value:,} bytes",
    "_seconds": lambda value: f"{milliseconds(value)} ms",
    "_share": percent,
}
"""By the end of a figure's name."""
MOST_FIGURES = 12
"""Of one finding; `compare --json` has all."""


def findings_section(rows: Sequence[Row]) -> Section:
    """Every finding, what its kind means, and the figures behind it; or that there is none."""
    found = find_all(rows)
    if not found:
        text = "None: every judged run is the same job as its reference and agrees with it."
        return Section("findings", "Findings", [Paragraph(text)])
    told = statements(found)
    blocks: list[Block] = []
    for role, heading in ROLES.items():
        lines = [(statement.id, statement.sentence) for statement in told if statement.role == role]
        if lines:
            blocks += [Heading(heading), Items(lines)]
    body = [line for finding in found for line in _lines(finding)]
    table = Table(key="finding_figures", columns=COLUMNS, rows=body)
    blocks += [
        Folded("What each of these findings means, how to confirm it and how to mend it", [_meanings(told)]),
        Folded("The figures behind the findings", [table]),
    ]
    return Section("findings", "Findings", blocks)


def _meanings(told: Sequence[Statement]) -> Items:
    """The entry of the catalogue of each kind that was found, so that a report can be read by itself."""
    known = kinds()
    return Items(
        [
            (
                f"{name} ({DOCUMENT}#{name})",
                f"{known[name].title}. Cause: {known[name].cause} How to confirm it: {known[name].confirm} "
                f"How to mend it: {known[name].fix}",
            )
            for name in dict.fromkeys(statement.id for statement in told)
        ]
    )


def _lines(finding: Finding) -> list[list[str]]:
    figures = list(flat(finding.values))
    shown = [[finding.id, listed(finding.backends), *figure] for figure in figures[:MOST_FIGURES]]
    rest = len(figures) - len(shown)
    return shown + ([[finding.id, listed(finding.backends), "and more", str(rest)]] if rest else [])


def flat(values: Any, name: str = "", unit: str = "") -> Iterator[tuple[str, str]]:
    """(figure, value with its unit) of every leaf of a finding's values; what is None is left out."""
    if name == "exceeded":
        values = {key: f"{words(found)}, allowed {words(most)}" for key, (found, most) in values.items()}
    if isinstance(values, dict):
        for key, value in values.items():
            end = next((end for end in UNITS if str(key).endswith(end)), unit)
            here = str(key).removesuffix(end)
            here = here if "." in here else here.replace("_", " ")  # a parameter keeps its name
            yield from flat(value, f"{name}, {here}" if name else here, end)
    elif isinstance(values, list | tuple) and any(isinstance(value, dict) for value in values):
        for number, value in enumerate(values, start=1):
            yield from flat(value, f"{name} {number}", unit)
    elif values is not None:
        is_number = isinstance(values, int | float) and not isinstance(values, bool)
        yield name, UNITS[unit](values) if unit and is_number else words(values)
