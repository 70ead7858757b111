"""A hand-out's table as data, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.tell.narrow import fitted, folded

MISSING = "n/a"
GB = 1e9
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class LabTable:
    """One table; cells are texts, those of what was not measured n/a."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Why a column is n/a, and what a figure is where that cannot be guessed."""
    title: str = ""

    def markdown(self) -> str:
        """The table, and below it the notes."""
        text = tabulate(self.rows, headers=list(self.headers), tablefmt="github", disable_numparse=True)
        head = [f"**{self.title}**", ""] if self.title else []
        return "\n".join(
            [*head, text, *(f"\n- {note}" if n == 0 else f"- {note}" for n, note in enumerate(self.notes))]
        )

    def text(self) -> str:
        """The same for a terminal: no line is longer than it is wide."""
        head = [self.title, ""] if self.title else []
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return folded("\n".join([*head, fitted(self.rows, self.headers), *notes]))


def shown(value: float | None, digits: int = 2) -> str:
    """A figure; n/a for None."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None, base: float | None) -> float | None:
    """Value over base; None if either is not known."""
    return None if value is None or not base else value / base


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
