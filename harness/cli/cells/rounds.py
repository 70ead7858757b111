"""`compare --precision` and `--max-minutes`: more rounds of the cells whose speeds are not settled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from harness.bounds import MOST_REPEATS
from harness.cli.cells.cell_runs import MissingCells
from harness.cli.terminal.output import View
from harness.errors import HarnessError
from harness.judge.wording import counted, listed
from harness.launch.cells import Cell
from harness.record import Record

if TYPE_CHECKING:
    from harness.judge.ranking import Ratio

FIRST_LOOK = 8
"""Rounds below which no order is clear enough to stop."""
GROWTH = 1.25
"""Rounds at a look over those at the look before: few looks, few chances to be misled."""
Name = tuple[str, str, int]
"""Job, backend and ranks."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """When no round is added any more."""

    precision: float | None = None
    """Half an interval over its ratio; None: any, if the order is settled."""
    deadline: float | None = None
    """By the monotonic clock; None: none."""

    def rounds(self, asked: int) -> int | None:
        """How many there will be; None: as many as it takes."""
        return asked if self == Until() else None


def parse_until(precision: str | None, minutes: float | None) -> Until:
    """What was asked; minutes count from now on. Raises HarnessError."""
    return Until(
        precision=parse_precision(precision) if precision is not None else None,
        deadline=time.monotonic() + 60 * minutes if minutes is not None else None,
    )


def parse_precision(text: str) -> float:
    """'3%' as 0.03. Raises HarnessError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if found is None or not 0 < float(found[1]) < 100:
        raise HarnessError(
            f"--precision was given '{text}'; give half the width of an interval in percent, such as 3%"
        )
    return float(found[1]) / 100


def add_rounds(
    plan: Callable[[int], list[Cell]], made: MissingCells, known: Mapping[str, Record],
    records: Sequence[Record], until: Until, view: View,
) -> list[Record]:  # fmt: skip
    """The records, with those of added rounds.

    `plan`: the cells of so many rounds; `known`: records that are used instead of a run. A cell that is
    settled is left out of later rounds; its base is not. A round in which a cell failed is none of that
    cell's; after two of them on end, or where it diverged, it is run no more. Where that is the base, those
    compared with it are not either, unless they are compared with the next one, since it diverged.
    """
    found = {record.cell: record for record in records}
    rounds = 1 + max((record.repeat for record in records), default=0)
    look, longest = max(rounds, FIRST_LOOK), 0.0
    wanted, bases = _compared(list(found.values()))
    if not wanted and not made.interrupted:
        view.say("no round is added: no two cells are compared in speed")
    while wanted and not made.interrupted:
        lost = {*wanted, *bases} & _failing(found.values(), rounds)
        if rounds >= look:
            before, (now, bases) = {*wanted, *bases}, _compared(list(found.values()))
            lost |= before - {*now, *bases}
            wanted = {
                name: now[name]
                for name in wanted
                if name in now and not now[name].is_settled(until.precision)
            }
            look = ceil(rounds * GROWTH)
        if lost:
            others = "; nor of cells that are compared with it" if lost & bases else ""
            view.say(f"no further round of {_named(dict.fromkeys(sorted(lost)))}: failed or diverged{others}")
            kept = {_place(base) for base in bases - lost}
            wanted = {n: ratio for n, ratio in wanted.items() if n not in lost and _place(n) in kept}
        if not wanted:
            if not lost:
                view.say(f"speeds are settled after {counted(rounds, 'round')}")
            break
        began = time.monotonic()
        if rounds >= MOST_REPEATS or (until.deadline is not None and began + longest > until.deadline):
            open_ = _named(_open(wanted, list(found.values()), until.precision)) or "none"
            view.say(f"no further round after {counted(rounds, 'round')}; open: {open_}")
            break
        rounds += 1
        view.say(f"round {rounds}; open: {_named(wanted)}")
        names = {*wanted, *(base for base in bases if _place(base) in set(map(_place, wanted)))}
        cells = [
            cell
            for cell in plan(rounds)
            if cell.repeat == rounds - 1 and (cell.job_id, cell.backend, cell.world_size) in names
        ]
        taken = {cell.key: known[cell.key] for cell in cells if cell.key in known}
        found |= taken
        # Who joins a round that lies before others is not compared with it.
        newest = max((record.repeat for record in known.values() if _name(record) in names), default=0)
        if not taken or rounds > newest:
            found |= made.run([cell for cell in cells if cell.key not in found], found.values())
        longest = max(longest, time.monotonic() - began)
    return list(found.values())


def _open(wanted: Container[Name], records: Sequence[Record], precision: float | None) -> dict[Name, Ratio]:
    """Those that the report will show as open, or less precise than asked."""
    return {
        name: ratio
        for name, ratio in _compared(records)[0].items()
        if name in wanted and (ratio.order == "open" or (precision and not ratio.is_settled(precision)))
    }


def _name(record: Record) -> Name:
    return record.job_id, record.backend.label, record.world.world_size


def _place(name: Name) -> tuple[str, int]:
    return name[0], name[2]


def _failing(records: Iterable[Record], rounds: int) -> set[Name]:
    """Cells without a result in the last two of so many rounds."""
    last = [record for record in records if record.repeat >= rounds - 2]
    return {_name(record) for record in last} - {_name(r) for r in last if r.status in ("ok", "diverged")}


def _compared(records: Sequence[Record]) -> tuple[dict[Name, Ratio], set[Name]]:
    """Each cell that has a speed, with its ratio to the base of its place; and these bases."""
    from harness.judge.comparison import Comparison
    from harness.judge.run_conditions import is_deterministic

    comparison = Comparison(records).comparable
    ratios: dict[Name, Ratio] = {}
    bases = set()
    usual = [group for group in comparison.groups if not is_deterministic(group.record)]
    for group in usual or comparison.groups:
        order = comparison.rankings.get(group.place)
        name = _name(group.record)
        if order is None or group.label not in order.names:
            continue
        if group.label == order.base:
            bases.add(name)
        else:
            ratios[name] = order.to_base[group.label]
    return ratios, bases


def _named(cells: Mapping[Name, Ratio | None]) -> str:
    """'fsdp on 2 (0.81, 0.61 to 1.03) and zero3 on 2'."""
    return listed([f"{label} on {size}{_words(ratio)}" for (_, label, size), ratio in cells.items()])


def _words(ratio: Ratio | None) -> str:
    """' (0.81, 0.61 to 1.03)'; empty while there are too few rounds, and of a base."""
    if ratio is None or ratio.extent is None or ratio.middle is None:
        return ""
    return f" ({ratio.middle:.2f}, {ratio.extent.low:.2f} to {ratio.extent.high:.2f})"
