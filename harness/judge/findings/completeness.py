"""Cells with missing runs: the remaining ones may be a selection."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from harness.bounds import MOST_REPEATS
from harness.judge.cell import Cell
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.wording import listed
from harness.record import Record

OPTION = "--repeats"


def find(runs: Runs) -> list[Finding]:
    """One finding per cell with a gap, whatever machine its runs were made on, unless it is unsupported."""
    cells: dict[tuple[str, str, int], list[Record]] = {}
    for row in runs.rows:
        record = row.record
        if record.status != "unsupported":
            cells.setdefault((record.job_id, row.backend, record.world.world_size), []).append(record)
    found = [_missing(backend, size, records) for (_, backend, size), records in cells.items()]
    return [finding for finding in found if finding is not None]


def _missing(backend: str, size: int, records: Sequence[Record]) -> Finding | None:
    seen = {record.repeat for record in records}
    due = min(max(max(seen) + 1, *(_asked(record.command) for record in records)), MOST_REPEATS)
    missing = sorted(set(range(due)) - seen)
    if not missing:
        return None
    numbers = listed([str(run) for run in missing])
    return Finding(
        id="runs-missing",
        about=Cell(backend, size),
        text=f"{len(missing)} of {due} runs {'is' if len(missing) == 1 else 'are'} missing from the records: "
        f"{'number' if len(missing) == 1 else 'numbers'} {numbers}, counted from 0",
        values={"missing": missing, "runs": due},
    )


def _asked(command: Sequence[str]) -> int:
    """How many runs of each cell a command asked for; 0 where it does not say."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == OPTION:
            with suppress(ValueError):
                return int(value if equals else following)
    return 0
