"""Rows that run a configuration file exactly as given: what makes them no like-for-like comparison."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.nested import differences
from harness.record import GivenPart, Record


def find(runs: Runs) -> list[Finding]:
    """One for each cell that ran a file exactly as given."""
    others = [
        row.record for row in runs.rows if not _is_as_given(row) and not _is_reference_of_given(row, runs)
    ]

    def judge(row: Row) -> Finding | None:
        part = row.record.backend.given
        return _finding(row, part, others) if part is not None and _is_as_given(row) else None

    return of_cells(runs, judge)


def _is_as_given(row: Row) -> bool:
    part = row.record.backend.given
    return part is not None and part.mode == "exactly-as-given"


def _is_reference_of_given(row: Row, runs: Runs) -> bool:
    """Whether a row only serves to judge rows that ran exactly as given."""
    same_job = [other for other in runs.rows if other.record.job_id == row.record.job_id]
    return row.is_reference and all(other is row or _is_as_given(other) for other in same_job)


def _finding(row: Row, part: GivenPart, others: list[Record]) -> Finding:
    unfair = _unfair(row.record, others)
    pinned = {s.key: {"given": s.given, "used": s.used} for s in part.pinned if s.used is not None}
    says = [f"{name} {mine} against {theirs}" for name, (mine, theirs) in unfair.items()]
    text = f"settings of {part.file} replace those of the comparison: {'; '.join(says)}" if says else (
        f"settings of {part.file} replace those of the comparison; none differs from those of the other rows"
    )  # fmt: skip
    if pinned:
        text += f". Not as given: {', '.join(pinned)}"
    values = {
        "file": part.file,
        "settings": {name: list(pair) for name, pair in unfair.items()},
        "pinned": pinned,
    }
    return Finding(id="exactly-as-given", about=row.cell, text=text, values=values)


def _unfair(record: Record, others: list[Record]) -> dict[str, tuple[object, object]]:
    """Settings with the row's value and that of the others: the job's, the cut of its batch, the preset."""
    other = next((found for found in others if found.world.world_size > 1), next(iter(others), None))
    if other is None:
        return {}
    mine, theirs = record.job.model_dump(mode="json"), other.job.model_dump(mode="json")
    found = {".".join(keys): (left, right) for keys, left, right in differences(mine, theirs)}
    for name in ("micro_batch_size", "accumulation_steps", "preset"):
        left, right = getattr(record.world, name), getattr(other.world, name)
        if left != right:
            found[name] = (left, right)
    return found
