"""Findings as a reader is told them: equal ones together, causes first, then what follows from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare.findings import (
    balance,
    completeness,
    impossible,
    instrumentation,
    machine,
    memory,
    timing,
    warmup,
)
from harness.compare.findings.finding import Finding
from harness.compare.wording import listed

Role = Literal["cause", "consequence", "figures"]
ROLES: dict[Role, str] = {
    "cause": "Causes: what differs from the reference, from the others or from what was asked",
    "consequence": "Consequences: what follows from it",
    "figures": "To mind in figures of speed and memory",
}
"""In the order in which a reader is told, with the heading of each."""
CONSEQUENCES = ("lost-updates", "gradient-differs", "update-differs", "diverged")
"""Of several about one run the last is the most general."""
ABOUT_FIGURES = frozenset(
    kind.id
    for module in (completeness, timing, impossible, warmup, machine, instrumentation, balance, memory)
    for kind in module.KINDS
)
DOCUMENT = "docs/findings.md"
_CELL = re.compile(r"(?P<label>.+) on (?P<size>\d+) ranks?", re.DOTALL)
_SIZE = re.compile(r" on \d+ ranks?(?=: )")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What one or several findings of a kind say alike, and of which cells."""

    id: str
    role: Role
    subjects: tuple[str, ...]
    """'ddp on 2 ranks', each once; empty for a finding about the whole table."""
    text: str

    @property
    def sentence(self) -> str:
        """'zero1 and zero2 on 2 ranks: gradient clipping differs'."""
        return f"{together(self.subjects)}: {self.text}" if self.subjects else self.text

    @property
    def reference(self) -> str:
        """Where its kind is explained."""
        return f"{DOCUMENT}#{self.id}"


def statements(findings: Sequence[Finding]) -> list[Statement]:
    """Findings that say the same of several cells as one; causes first, order kept otherwise."""
    found: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        subject, text = divide(finding)
        cells = found.setdefault((finding.id, text), [])
        if subject and subject not in cells:
            cells.append(subject)
    told = [
        Statement(id=kind, role=role_of(kind), subjects=tuple(cells), text=text)
        for (kind, text), cells in found.items()
    ]
    order = list(ROLES)
    return sorted(told, key=lambda statement: (order.index(statement.role), _rank(statement.id)))


def role_of(kind: str) -> Role:
    """What a finding of this kind is to its reader."""
    if kind in CONSEQUENCES:
        return "consequence"
    return "figures" if kind in ABOUT_FIGURES else "cause"


def together(subjects: Sequence[str], most: int | None = None) -> str:
    """Cells of one kind in few words: 'zero1 and zero2 on 2 and 4 ranks; fsdp-hybrid on 4 ranks'.

    Of backends on the same numbers of ranks `most` are named, all where it is None. A subject that is no
    cell, such as a list of backends, stands first and as it is.
    """
    sizes: dict[str, set[int]] = {}
    others: list[str] = []
    for subject in subjects:
        match = _CELL.fullmatch(subject)
        if match:
            sizes.setdefault(match["label"], set()).add(int(match["size"]))
        elif subject not in others:
            others.append(subject)
    alike: dict[tuple[int, ...], list[str]] = {}
    for label, of_label in sizes.items():
        alike.setdefault(tuple(sorted(of_label)), []).append(label)
    cells = [f"{listed(labels, most or len(labels))} on {_ranks(on)}" for on, labels in alike.items()]
    return "; ".join([*([listed(others, most or len(others))] if others else []), *cells])


def _ranks(sizes: Sequence[int]) -> str:
    """'1 rank', '2 and 4 ranks'."""
    return f"{listed([str(size) for size in sizes], len(sizes))} rank{'' if list(sizes) == [1] else 's'}"


def divide(finding: Finding) -> tuple[str, str]:
    """The cell that a message begins with, as `finding.subject` writes it, and what it says of it."""
    for label in finding.backends:
        size = _SIZE.match(finding.message, len(label)) if finding.message.startswith(label) else None
        if size:
            return finding.message[: size.end()], finding.message[size.end() + len(": ") :]
    return "", finding.message


def _rank(kind: str) -> int:
    return CONSEQUENCES.index(kind) if kind in CONSEQUENCES else 0
