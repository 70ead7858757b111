"""The cells of a matrix that also has rows from files of other tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.job.experiment import Experiment
from harness.launch.cells import Cell, in_rounds, plan
from harness.record import GivenPart
from harness.run_directory.request import Resume

if TYPE_CHECKING:
    from harness.brought.rows import GivenRow


def plan_with_files(
    experiment: Experiment,
    backends: Iterable[str],
    rows: Sequence[GivenRow],
    world_sizes: Sequence[int],
    repeats: int,
    device: str,
    *,
    resume: Resume | None = None,
) -> list[Cell]:
    """The cells of `plan` and those of rows from files.

    A row that is run exactly as given may train another job: it then brings the reference of that job.
    Raises HarnessError as `plan` does.
    """
    like = [row for row in rows if row.part.mode == "like-for-like"]
    labels = [*backends, *(row.label for row in like)]
    cells = plan(experiment, labels, world_sizes, repeats, device, resume=resume)
    for row in rows:
        if row.part.mode == "exactly-as-given":
            cells += plan(row.experiment, [row.label], world_sizes, repeats, device, resume=resume)
    parts = {row.label: row.part for row in rows}
    unique = {cell.key: cell for cell in (with_file(cell, parts.get(cell.backend)) for cell in cells)}
    return in_rounds(unique.values())


def with_file(cell: Cell, part: GivenPart | None) -> Cell:
    """The cell of a row from a file: another cell where the file, or what became of its keys, is another."""
    if part is None:
        return cell
    key = hashlib.sha256((cell.key + part.model_dump_json()).encode()).hexdigest()[:16]
    return replace(cell, given=part, key=key)
