"""Findings: causes first, then consequences and caveats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.judge.cell import Backends, CellName, name_cells
from harness.judge.comparison import Comparison
from harness.judge.findings.finders import kinds
from harness.judge.findings.finding import Finding
from harness.judge.findings.groups import DOCUMENT, ROLES, Statement, role_of, statements
from harness.judge.wording import words
from harness.tell.document import Block, Folded, Heading, Items, Paragraph, Section, Table
from harness.tell.formats import milliseconds, percent
from harness.tell.tables import table_columns

UNITS = {
    "_bytes": lambda value: f"{value:,} bytes",
    "_seconds": lambda value: f"{milliseconds(value)} ms",
    "_share": percent,
}
"""By the suffix of a figure's name."""
MOST_FIGURES = 12
"""Of one finding; `compare --json` has all."""
MOST_VALUES = 3
"""Of one figure of one cell, which may differ between repeats."""
MOST_OF_A_KIND = 3
"""Sentences about one kind of finding that are not folded."""


def findings_section(comparison: Comparison) -> Section:
    """Every finding, the meaning of its kind, and its figures; or that there is none."""
    found = comparison.findings
    if not found:
        return Section("findings", "Findings", [Paragraph(no_findings(comparison))])
    merged = statements(found)
    blocks: list[Block] = []
    for role, heading in ROLES.items():
        of_role = [statement for statement in merged if statement.role == role]
        if of_role:
            blocks += [Heading(heading), *_sentences(of_role)]
    table = Table(key="finding_figures", columns=table_columns("findings"), rows=_figures(found))
    blocks += [
        Folded("Meaning of each finding, how to confirm and fix it", [_meanings(merged)]),
        Folded("Figures behind the findings", [table]),
    ]
    return Section("findings", "Findings", blocks)


def no_findings(comparison: Comparison) -> str:
    """What it means that nothing was found."""
    is_judged = any(row.judgement.parity != "unjudged" and not row.is_reference for row in comparison.rows)
    return (
        "None: every judged run trained the same job as its reference and agrees with it."
        if is_judged
        else "None, but no run could be compared with a reference."
    )


def _meanings(merged: Sequence[Statement]) -> Items:
    """The entry of the catalogue of each kind that was found, so that a report can be read by itself."""
    known = kinds()
    return Items(
        [
            (
                f"{name} ({DOCUMENT}#{name})",
                f"{known[name].title}. Cause: {known[name].cause} Confirm: {known[name].confirm} "
                f"Fix: {known[name].fix}",
            )
            for name in dict.fromkeys(statement.id for statement in merged)
        ]
    )


def _sentences(merged: Sequence[Statement]) -> list[Block]:
    """The first sentences of each kind, and the others folded."""
    of_kind: dict[str, list[tuple[str, str]]] = {}
    for statement in merged:
        of_kind.setdefault(statement.id, []).append((statement.id, statement.sentence))
    first = [line for lines in of_kind.values() for line in lines[:MOST_OF_A_KIND]]
    rest = {name: lines[MOST_OF_A_KIND:] for name, lines in of_kind.items() if lines[MOST_OF_A_KIND:]}
    if not rest:
        return [Items(first)]
    counts = ", ".join(f"{name} {len(lines)}" for name, lines in rest.items())
    folded = [line for lines in rest.values() for line in lines]
    return [Items(first), Folded(f"More of the same kinds: {counts}", [Items(folded)])]


def _figures(found: Sequence[Finding]) -> list[list[str]]:
    """Figures of the findings, causes first; cells with equal figures share a line."""
    order = list(ROLES)
    values: dict[tuple[str, CellName | Backends, str], list[str]] = {}
    for finding in sorted(found, key=lambda finding: order.index(role_of(finding.id))):
        for figure, value in _first_figures(finding):
            of_repeats = values.setdefault((finding.id, finding.about, figure), [])
            if value not in of_repeats:
                of_repeats.append(value)
    alike: dict[tuple[str, str, str], list[CellName | Backends]] = {}
    for (name, about, figure), of_repeats in values.items():
        alike.setdefault((name, figure, _joined(of_repeats)), []).append(about)
    return [[name, name_cells(abouts), figure, value] for (name, figure, value), abouts in alike.items()]


def _first_figures(finding: Finding) -> list[tuple[str, str]]:
    figures = list(flat(finding.values))
    rest = len(figures) - MOST_FIGURES
    return [*figures[:MOST_FIGURES], *([("and more", str(rest))] if rest > 0 else [])]


def _joined(values: Sequence[str]) -> str:
    rest = len(values) - MOST_VALUES
    return "; ".join([*values[:MOST_VALUES], *([f"{rest} more"] if rest > 0 else [])])


def flat(values: Any, name: str = "", unit: str = "") -> Iterator[tuple[str, str]]:
    """(figure, value with its unit) of every leaf of a finding's values that is not None."""
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
