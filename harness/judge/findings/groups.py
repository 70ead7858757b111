"""Findings as a reader sees them: equal ones merged, causes first, then consequences and caveats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.judge.findings.finding import Finding
from harness.judge.wording import CellName, name_cells

Role = Literal["cause", "consequence", "figures"]
ROLES: dict[Role, str] = {
    "cause": "Causes",
    "consequence": "Consequences",
    "figures": "Caveats for speed and memory",
}
"""Headings, in the order of the report."""
CONSEQUENCES = ("lost-updates", "gradient-differs", "update-differs", "diverged")
"""From the most specific to the most general."""
ABOUT_FIGURES = frozenset(
    (
        "runs-missing", "nothing-timed", "faster-than-possible", "inconsistent-timing", "warmup-too-short",
        "busy-machine", "cores-shared", "numa-unbound", "instrumented-timing", "slow-rank", "slow-data",
        "memory-differs", "memory-grows", "memory-spikes", "memory-imbalance",
        "work-outside-clock", "implausible-energy",
    )
)  # fmt: skip
DOCUMENT = "docs/findings.md"


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
        """Where its kind is explained."""
        return f"{DOCUMENT}#{self.id}"


def statements(findings: Sequence[Finding]) -> list[Statement]:
    """Findings that say the same of several cells as one; causes first, order kept otherwise."""
    found: dict[tuple[str, str], dict[CellName, None]] = {}
    for finding in findings:
        cells = found.setdefault((finding.id, finding.clause), {})
        if finding.cell is not None:
            cells[finding.cell] = None
    merged = [
        Statement(id=kind, role=role_of(kind), cells=tuple(cells), text=text)
        for (kind, text), cells in found.items()
    ]
    order = list(ROLES)
    return sorted(merged, key=lambda statement: (order.index(statement.role), _rank(statement.id)))


def role_of(kind: str) -> Role:
    """What a finding of this kind is to its reader."""
    if kind in CONSEQUENCES:
        return "consequence"
    return "figures" if kind in ABOUT_FIGURES else "cause"


def _rank(kind: str) -> int:
    return CONSEQUENCES.index(kind) if kind in CONSEQUENCES else 0
