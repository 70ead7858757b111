"""A finding of a comparison as data, what its kind means, and findings as a reader sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import Backends, CellName, entries, name_cells, sentence

Role = Literal["cause", "consequence", "figures"]
ROLES: dict[Role, str] = {
    "cause": "Causes",
    "consequence": "Consequences",
    "figures": "Caveats for speed and memory",
}
"""Headings, in the order of the report."""
DOCUMENT = "docs/findings.md"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a reader of a comparison must know."""

    id: str
    """Stable; one of the kinds in the catalogue."""
    about: CellName | Backends
    """The cell that it is about, or the labels of the backends whose runs it compares."""
    text: str
    """What was found, without the cell and the number of runs."""
    runs: tuple[int, int] | None = None
    """In how many of how many repeats of the cell, where it is not all of them."""
    values: dict[str, Any] = field(default_factory=dict)
    """The figures behind the text; JSON-serialisable."""

    @property
    def cell(self) -> CellName | None:
        return self.about if isinstance(self.about, CellName) else None

    @property
    def backends(self) -> Backends:
        return (self.about.label,) if isinstance(self.about, CellName) else self.about

    @property
    def clause(self) -> str:
        """The text with its number of runs: 'rank 1 is slower; in 1 of 7 runs'."""
        return self.text if self.runs is None else f"{self.text}; in {self.runs[0]} of {self.runs[1]} runs"

    @property
    def message(self) -> str:
        """One sentence: 'ddp on 2 ranks: rank 1 is slower; in 1 of 7 runs'."""
        return self.clause if self.cell is None else f"{self.cell}: {self.clause}"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "backends": list(self.backends),
            "message": self.message,
            "values": self.values,
        }


def found(
    kind: str, about: CellName | Backends, values: dict[str, Any], case: str = "", /, **words: Any
) -> Finding:
    """A finding with the sentence that `findings.toml` has for its figures.

    case: which of the kind's sentences. words: what only the sentence needs.
    """
    return Finding(id=kind, about=about, text=sentence(kind, case, **(values | words)), values=values)


PARTS = ("title", "cause", "confirm", "reported", "fix")
"""What `findings.toml` explains of a kind; 'reported': from which figures on, where a threshold decides."""


def role_of(kind: str) -> Role:
    role: Role = entries()[kind]["role"]
    return role


Rule = Callable[[JudgedRun], Iterable[Finding]]
"""What one run shows."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Those of one module."""

    of_runs: tuple[Rule, ...] = ()
    of_cells: tuple[Rule, ...] = ()
    """Those that also say in how many repeats."""
    of_all: tuple[Callable[[Runs], Iterable[Finding]], ...] = ()
    """Those that compare runs."""


def of_cells(runs: Runs, rule: Rule) -> Iterator[Finding]:
    """Findings about single runs, each with the number of repeats of its cell that have the same one."""
    for group in runs.groups:
        of_group = [finding for row in group.rows for finding in rule(row)]
        counts = Counter((finding.id, finding.text) for finding in of_group)
        for finding in of_group:
            count, of = counts[finding.id, finding.text], len(group.rows)
            yield finding if count == of else replace(finding, runs=(count, of))


def labels(rows: Sequence[JudgedRun]) -> Backends:
    return tuple(sorted({row.label for row in rows}))


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What one or several findings of a kind say alike, and of which cells."""

    id: str
    role: Role
    cells: tuple[CellName, ...]
    """Each once; empty for a finding about several backends."""
    text: str

    @property
    def sentence(self) -> str:
        """'zero1 and zero2 on 2 ranks: gradient clipping differs'."""
        return f"{name_cells(self.cells)}: {self.text}" if self.cells else self.text

    @property
    def reference(self) -> str:
        return f"{DOCUMENT}#{self.id}"


def statements(findings: Sequence[Finding]) -> list[Statement]:
    """Findings that say the same of several cells as one; causes first, order kept otherwise."""
    alike: dict[tuple[str, str], dict[CellName, None]] = {}
    for finding in findings:
        cells = alike.setdefault((finding.id, finding.clause), {})
        if finding.cell is not None:
            cells[finding.cell] = None
    merged = [
        Statement(id=kind, role=role_of(kind), cells=tuple(cells), text=text)
        for (kind, text), cells in alike.items()
    ]
    roles, order = list(ROLES), list(entries())
    specific = {kind: order.index(kind) for kind in order if role_of(kind) == "consequence"}
    # Consequences from the most specific to the most general, which is 'diverged'.
    specific["diverged"] = len(order)
    return sorted(merged, key=lambda one: (roles.index(one.role), specific.get(one.id, 0)))
