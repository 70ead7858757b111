"""What a check of a report found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Something in the report that does not follow from its records."""

    file: str
    line: int | None
    what: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.what}"


@dataclass(kw_only=True)
class Verification:
    """What a check found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        problems = [{"file": p.file, "line": p.line, "what": p.what} for p in self.problems]
        return {"holds": not problems, "problems": problems, "notes": self.notes}
