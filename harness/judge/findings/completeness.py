"""Cells with a gap: runs that a command asked for and that are missing, or came to no result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from harness.bounds import MOST_REPEATS
from harness.judge.findings.finding import Finding
from harness.judge.rows import Runs
from harness.judge.wording import CellName, listed, numbered
from harness.record import Record

OPTION = "--repeats"


def find_completeness(runs: Runs) -> list[Finding]:
    """Findings per cell with a gap, or with runs without a result, whatever machine its runs were made on.

    None of an unsupported one, or of one in which no run succeeded.
    """
    cells: dict[tuple[str, str, int], list[Record]] = {}
    rounds: dict[tuple[str, ...], int] = {}
    for row in runs.rows:
        record = row.record
        if record.status != "unsupported":
            cells.setdefault((record.job_id, row.backend, record.world.world_size), []).append(record)
            command = tuple(record.command)
            rounds[command] = max(rounds.get(command, 0), record.repeat + 1)
    found = []
    for (_, backend, size), records in cells.items():
        cell = CellName(backend, size)
        due = max(max(record.repeat + 1, _due(record.command, rounds)) for record in records)
        found += [_missing(cell, records, min(due, MOST_REPEATS)), _without_result(cell, records, due)]
    return [finding for finding in found if finding is not None]


def _due(command: Sequence[str], rounds: Mapping[tuple[str, ...], int]) -> int:
    """Runs of each cell that a command made: those it asked for, as far as any of its cells is here.

    Another command that asks for fewer takes over the first runs of all.
    """
    return min(_asked(command), rounds[tuple(command)])


def _missing(cell: CellName, records: Sequence[Record], due: int) -> Finding | None:
    missing = sorted(set(range(due)) - {record.repeat for record in records})
    if not missing:
        return None
    return Finding(
        id="runs-missing",
        about=cell,
        text=f"{len(missing)} of {due} runs {'is' if len(missing) == 1 else 'are'} missing from the records: "
        f"{numbered('number', missing)}, counted from 0",
        values={"missing": missing, "runs": due},
    )


def _without_result(cell: CellName, records: Sequence[Record], due: int) -> Finding | None:
    known = {record.repeat for record in records if record.status == "ok"}
    ended = {r.repeat: r.status for r in records if r.repeat not in known and not r.was_interrupted}
    if not known or not ended or "diverged" in ended.values():
        return None
    numbers = sorted(ended)
    return Finding(
        id="runs-missing",
        about=cell,
        text=f"{len(numbers)} of {due} runs came to no result ({listed(sorted(set(ended.values())))}) and "
        f"{'is' if len(numbers) == 1 else 'are'} left out of figures and speeds: "
        f"{numbered('number', numbers)}, counted from 0",
        values={"without_result": numbers, "runs": due},
    )


def _asked(command: Sequence[str]) -> int:
    """How many runs of each cell a command asked for; 0 where it does not say."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == OPTION:
            with suppress(ValueError):
                return int(value if equals else following)
    return 0
