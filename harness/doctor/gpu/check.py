"""A check as data, what it looks at, and how it is answered: ok, failed, skipped or n/a, with the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.fabric.result import FabricResult
from harness.forms.flops import is_stub
from harness.gpus.found import Gpus
from harness.judge.rows import reason
from harness.record import Record
from harness.run_directory.rank_state import DeviceNote

SINGLE, AGAIN, ON_CPU, ZERO, FULL, SHARDED = "single", "again", "cpu", "zero2", "out of memory", "fsdp"
FABRIC = "fabric"
RUNS = (ON_CPU, SINGLE, AGAIN, ZERO, FULL, SHARDED)

Kernels = Mapping[int, Mapping[int, int]]
"""Kernels of NCCL by rank and traced step."""


@dataclass(kw_only=True)
class Evidence:
    """Everything that was measured; what is missing has its reason in `missing`."""

    gpus: Gpus
    ranks: int
    """Of the runs on several GPUs."""
    records: dict[str, Record] = field(default_factory=dict)
    """By the names above."""
    notes: dict[str, tuple[DeviceNote, ...]] = field(default_factory=dict)
    """Of each run's ranks, in order."""
    kernels: dict[str, Kernels] = field(default_factory=dict)
    """Of runs whose traces were kept."""
    fabric: FabricResult | None = None
    seconds_to_notice: float | None = None
    """From the planted lack of memory to the record that says so."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a run, or the measurement of the network, was not made."""
    is_interrupted: bool = False
    """The user ended it: what was measured until then is there."""

    @property
    def is_stub(self) -> bool:
        """Whether any of the devices is no GPU."""
        return any(is_stub(gpu.name) for gpu in self.gpus.devices)


Verdict = Literal["ok", "failed", "skipped", "n/a"]
Finding = tuple[Verdict, str]
"""The verdict, and what was measured or why nothing was."""
Judge = Callable[[Evidence], Finding]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about the machine."""

    id: str
    question: str
    tolerance: str
    judge: Judge
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
