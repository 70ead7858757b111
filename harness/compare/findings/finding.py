"""What a reader must be told, and what each kind of it means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.compare.wording import cell


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a reader must be told about a comparison."""

    id: str
    """Stable; one of the kinds in the catalogue."""
    backends: tuple[str, ...]
    """Labels of the backends that it is about."""
    message: str
    """One sentence that names the cause."""
    values: dict[str, Any] = field(default_factory=dict)
    """The figures behind the message; JSON-serialisable."""

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
    """What a reader is told, in a few words."""
    cause: str
    confirm: str
    fix: str
    """What to change, in terms of DeepSpeed, FSDP, DDP and Accelerate."""


def of_cells(rows: Sequence[Row], judge: Callable[[Row], Finding | None]) -> list[Finding]:
    """What is found of each run by itself; where not all repeats of a cell say it, in how many they do."""
    found = []
    for group in group_repeats(rows):
        of_group = [finding for row in group.rows if (finding := judge(row)) is not None]
        counts = Counter(finding.message for finding in of_group)
        for finding in of_group:
            runs, all_runs = counts[finding.message], len(group.rows)
            told = finding.message if runs == all_runs else f"{finding.message}; in {runs} of {all_runs} runs"
            found.append(replace(finding, message=told))
    return found


def subject(row: Row) -> str:
    """'ddp on 2 ranks': what a message about one run begins with."""
    return cell(row.record.backend.label, row.record.world.world_size)


def labels(rows: list[Row]) -> tuple[str, ...]:
    """The backends of rows, each once, sorted."""
    return tuple(sorted({row.record.backend.label for row in rows}))
