"""Observed scripts that train something else than they seem to: nothing, apart, or with an empty group."""

from __future__ import annotations

from harness.forms.terms import STEP_PHASES
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.wording import counted
from harness.record import Record

SCALAR_BYTES = 8
"""Of a collective: such as a loss or a count that is gathered for a log. A weight alone is as small, but not
all of a model's."""


def find(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run of a script."""
    return [
        *of_cells(runs, _nothing_updated),
        *of_cells(runs, _empty_group),
        *of_cells(runs, _ranks_alone),
    ]


def _nothing_updated(row: Row) -> Finding | None:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return None
    rates = [rate for group in record.observation.learning_rates for rate in group if rate is not None]
    given = sum(group.get("tensors", 0) for group in seen.optimizer_groups)
    if seen.updated_tensors == 0 and not seen.optimizer_steps:
        text = (
            f"the optimizer updated nothing: none of its {counted(given, 'tensor')} had a gradient; it was "
            "probably made before the model was wrapped"
        )
    elif rates and not any(rates) and len(record.steps) > 1:
        text = f"the optimizer updated nothing: its learning rate is 0 in all {len(record.steps)} steps"
    else:
        return None
    values = {"updated_tensors": seen.updated_tensors, "tensors": given}
    return Finding(id="nothing-updated", about=row.cell, text=text, values=values)


def _empty_group(row: Row) -> Finding | None:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return None
    counts = [group.get("tensors") for group in seen.optimizer_groups]
    empty = [place for place, count in enumerate(counts) if count == 0]
    if not empty:
        return None
    noun = f"group {empty[0]}" if len(empty) == 1 else f"groups {', '.join(map(str, empty))}"
    verb = "is" if len(empty) == 1 else "are"
    return Finding(
        id="empty-group",
        about=row.cell,
        text=f"{noun} of the optimizer's {len(counts)} {verb} empty: no parameter trains with its rate and "
        "decay",
        values={"empty": empty, "tensors": counts},
    )


def _ranks_alone(row: Row) -> Finding | None:
    record = row.record
    if record.observation is None or record.world.world_size == 1 or not record.windows:
        return None
    if record.windows.probed == 0:
        return None  # nothing was counted
    moved = [part for part in record.comm if part.phase in STEP_PHASES and part.payload_bytes]
    wrapped = record.observation.base is not None
    if any(wrapped or (part.largest_bytes or part.payload_bytes) > SCALAR_BYTES for part in moved):
        return None
    size = record.world.world_size
    same = _on_same_samples(record)
    alike = ", all on the same samples" if same else ""
    return Finding(
        id="ranks-alone",
        about=row.cell,
        text=f"{size} ranks train without exchanging gradients: each has a model of its own{alike}",
        values={"ranks": size, "same_samples": same},
    )


def _on_same_samples(record: Record) -> bool:
    fed = [rank.batch_digests for rank in record.ranks]
    return len(fed) > 1 and bool(fed[0]) and all(digests == fed[0] for digests in fed)
