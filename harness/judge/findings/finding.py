"""A finding of a comparison as data, and what its kind means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import Backends, CellName


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
        """None for a finding about several backends."""
        return self.about if isinstance(self.about, CellName) else None

    @property
    def backends(self) -> Backends:
        """Labels of the backends that it is about."""
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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding, as `docs/findings.md` explains it."""

    id: str
    title: str
    """What was found, in a few words."""
    cause: str
    confirm: str
    reported: str | None
    """From which figures on, where a threshold decides."""
    fix: str
    """What to change, in terms of DeepSpeed, FSDP, DDP and Accelerate."""


def of_cells(runs: Runs, judge: Callable[[JudgedRun], Finding | None]) -> list[Finding]:
    """Findings about single runs, each with the number of repeats of its cell that have the same one."""
    found = []
    for group in runs.groups:
        of_group = [finding for row in group.rows if (finding := judge(row)) is not None]
        counts = Counter(finding.text for finding in of_group)
        for finding in of_group:
            count, of = counts[finding.text], len(group.rows)
            found.append(finding if count == of else replace(finding, runs=(count, of)))
    return found


def labels(rows: Sequence[JudgedRun]) -> Backends:
    """The backends of rows, each once, sorted."""
    return tuple(sorted({row.label for row in rows}))
