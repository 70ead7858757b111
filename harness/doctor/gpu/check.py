"""A check as data, and how it is answered: ok, failed, skipped or n/a, each with the figure or the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.doctor.gpu.evidence import Evidence
from harness.judge.rows import reason

Verdict = Literal["ok", "failed", "skipped", "n/a"]
Finding = tuple[Verdict, str]
"""The verdict, and what was measured or why nothing was."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about the machine."""

    id: str
    question: str
    tolerance: str
    judge: Callable[[Evidence], Finding]
    """Called where all that it needs is there."""
    runs: tuple[str, ...] = ()
    """Runs that it needs; they must have ended well."""
    least_ranks: int = 1
    not_on_stub: str | None = None
    """Why a machine without a GPU cannot answer; None: it can."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came out of a check."""

    check: Check
    verdict: Verdict
    detail: str

    def as_json(self) -> dict[str, Any]:
        """For `--json` and the bundle."""
        return {
            "id": self.check.id,
            "question": self.check.question,
            "tolerance": self.check.tolerance,
            "verdict": self.verdict,
            "detail": self.detail,
        }


def answer(check: Check, evidence: Evidence) -> Answer:
    """Judge, unless the machine or a run that is missing rules that out."""
    verdict, detail = _obstacle(check, evidence) or check.judge(evidence)
    return Answer(check=check, verdict=verdict, detail=detail)


def held(condition: bool, detail: str) -> Finding:
    """Ok or failed."""
    return ("ok" if condition else "failed"), detail


def _obstacle(check: Check, evidence: Evidence) -> Finding | None:
    if check.not_on_stub is not None and evidence.is_stub:
        return "n/a", f"CUDA stub: {check.not_on_stub}"
    if evidence.ranks < check.least_ranks:
        return "skipped", "there is one GPU"
    for name in check.runs:
        if name not in evidence.records:
            return "skipped", evidence.missing.get(name, f"the run {name} was not made")
        record = evidence.records[name]
        if record.status != "ok":
            return "failed", f"the run {name} ended as {record.status}: {reason(record) or 'no reason given'}"
    return None
