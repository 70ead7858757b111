"""States that were to lie in files, for which host memory holds as much."""

from __future__ import annotations

from harness.forms.zero3.states import BUFFER_TERM, READ_TERM, UPDATED_TERM
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.states import rank_states

BUFFER_TERMS = (BUFFER_TERM, READ_TERM, UPDATED_TERM)


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
    held = [states for states in rank_states(row.record) if states.file_bytes is not None]
    if not held:
        return None
    files = sum(states.file_bytes or 0 for states in held)
    expected = [states.expected for states in held if states.expected is not None]
    buffers = sum(term.bytes for form in expected for term in form.terms if term.name in BUFFER_TERMS)
    if files > buffers:
        return None
    what = "weights and optimizer states" if _swaps_weights(row) else "optimizer states"
    kept = f"{buffers:,} bytes of buffers stay in host memory for them"
    return Finding(
        id="swapping-frees-no-memory",
        about=row.cell,
        text=f"{files:,} bytes of {what} lie in files, and {kept}",
        values={"file_bytes": files, "buffer_bytes": buffers},
    )


def _swaps_weights(row: Row) -> bool:
    effective = row.record.backend.effective
    return effective is not None and "weights in files" in effective.offload
