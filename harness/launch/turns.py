"""Cells that take turns: set up one after the other, then some timed steps of each in random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence

from harness.backends import registry
from harness.launch.cells import Cell
from harness.launch.ending import leaving_none_behind
from harness.launch.launcher import InTurns
from harness.record import PredictionPart, Record
from harness.run_directory.events import TurnEvent

PROCESS_BYTES = 300 * 2**20
"""Of a rank on the CPU beside what is predicted: the interpreter, and what libraries write to."""
FILLED = 0.8
"""The most of a machine's free memory that cells alive at once may take."""
UNKNOWN = 2
"""A cell whose memory is not predicted is counted as so many times what the nearest other one needs."""
AUTO = 1
"""Timed steps of a turn where `compare.turns` is auto."""


def take_turns(
    runs: Mapping[str, InTurns[Record]], steps: int, on_turn: Callable[[str], None]
) -> Generator[tuple[str, Record]]:
    """The record of each cell as it ends, by its key; `on_turn` is told which one goes on.

    Where one is interrupted, all that have begun are, each with its record.
    """
    waiting: dict[str, str] = {}
    interrupted: KeyboardInterrupt | None = None
    with leaving_none_behind():
        try:
            for key, place in _order(runs, waiting):
                on_turn(key)
                record = _go_on(runs[key], key, waiting, steps, place)
                if record is not None:
                    yield key, record
                    if record.was_interrupted:
                        break
        except KeyboardInterrupt as error:  # between two turns, or where a cell begins or ends
            interrupted = error
        except BaseException:
            for run in runs.values():
                run.close()
            raise
        for key in waiting:
            try:
                runs[key].throw(KeyboardInterrupt())
            except StopIteration as end:
                interrupted = None
                yield key, end.value
        if interrupted is not None:  # no record says so
            raise interrupted


def _order(runs: Mapping[str, object], waiting: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """Each cell without a place as it is set up; then those that wait, with the places of their turns."""
    yield from ((key, None) for key in runs)
    place = 0
    while waiting:
        for key in random.sample(list(waiting), len(waiting)):
            yield key, place
            place += 1


def _go_on(
    run: InTurns[Record], key: str, waiting: dict[str, str], steps: int, place: int | None
) -> Record | None:
    """Until the cell waits for its next turn, or has its record. `waiting`: run ids by cell."""
    beside = [run_id for other, run_id in waiting.items() if other != key]
    try:
        if place is None:
            waiting[key] = next(run)
        else:
            run.send(TurnEvent(steps=steps, place=place, beside=beside))
    except StopIteration as end:
        waiting.pop(key, None)
        return end.value  # type: ignore[no-any-return]
    except BaseException:  # it is over, without a record
        waiting.pop(key, None)
        raise
    return None


def groups(
    cells: Sequence[Cell], turns: int | None, device: str, parts: Mapping[str, PredictionPart],
    unknown: Collection[str], known: Iterable[Record], say: Callable[[str], None],
) -> list[list[Cell]]:  # fmt: skip
    """The cells in the order they run; those of one list take turns. `say` is told why some do not.

    All of a round do where they fit together, so that numbers of ranks can be compared too; else those of
    one number of ranks. `parts`: by cell, what its run is predicted to need; `unknown`: cells of which that
    cannot be predicted: they are counted as `UNKNOWN` times the same backend with fewer options, or the
    greediest cell. Others without a prediction will not run. `known`: records of other cells of these
    rounds, after which the rest of a round runs in the same way.
    """
    rounds: dict[object, list[Cell]] = {}
    known = list(known)
    took_turns, ran_whole = _earlier(known)
    if _joined(cells, known) > 1:
        say(f"{OTHERS_RAN}; --fresh runs all again")
    told: dict[str, None] = {}
    needs = _needs(cells, parts, unknown)
    free = [part.host_limit_bytes for part in parts.values() if part.host_limit_bytes is not None]
    limit = min(free, default=None)
    for cell in cells:
        asked = turns is not None and cell.measure.timed
        is_one = asked and cell.key in needs
        rounds.setdefault(cell.repeat if is_one else cell.key, []).append(cell)
        if is_one and cell.repeat in took_turns:
            told[f"{OTHERS_TOOK_TURNS}; --fresh runs all again"] = None
        if asked and not needs and cell.key in unknown:
            told["cells do not take turns: the memory of none is known"] = None
    divided: list[list[Cell]] = []
    for together in rounds.values():
        if _why_whole(together, device, needs, limit, ran_whole) is None:
            divided.append(together)
            continue
        of_size: dict[int, list[Cell]] = {}
        for cell in together:
            of_size.setdefault(cell.world_size, []).append(cell)
        for size, group in of_size.items():
            why = _why_whole(group, device, needs, limit, ran_whole)
            divided += [group] if why is None else [[cell] for cell in group]
            if why is not None:
                told[f"cells on {_ranks(size)} do not take turns: {why}"] = None
    for text in told:
        say(f"compare.turns: {text}")
    return divided


def _needs(
    cells: Sequence[Cell], parts: Mapping[str, PredictionPart], unknown: Collection[str]
) -> dict[str, int]:
    """Host memory of each cell that will run, bytes; without those that nothing is known of."""
    needs = {key: part.host_bytes for key, part in parts.items() if not part.refused}
    predicted = [cell for cell in cells if cell.key in needs]
    for cell in cells:
        if cell.key in unknown and predicted:
            name, size = cell.backend.partition(":")[0], cell.world_size
            alike = [c for c in predicted if (c.backend.partition(":")[0], c.world_size) == (name, size)]
            nearest = min(alike, key=lambda c: len(c.backend), default=None)
            found = needs[nearest.key] if nearest else max(needs[c.key] for c in predicted)
            needs[cell.key] = UNKNOWN * found
    return needs


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


OTHERS_TOOK_TURNS = "earlier cells took turns and are not compared in speed with those that run now"


OTHERS_RAN = "cells that run now are compared in speed in one of the earlier rounds only"


def _joined(cells: Iterable[Cell], known: Iterable[Record]) -> int:
    """Of how many rounds cells run now of which others, on as many ranks, ran whole before."""
    before = {(r.job_id, r.world.world_size, r.repeat) for r in _timed(known) if r.turns is None}
    now = {
        (cell.job_id, cell.world_size, cell.repeat)
        for cell in cells
        if cell.measure.timed and cell.backend != registry.REFERENCE
    }
    return len(before & now)


def _timed(known: Iterable[Record]) -> list[Record]:
    """The reference does not decide: a whole one stands for one in turns."""
    return [
        record
        for record in known
        if record.status == "ok" and record.windows is not None and record.windows.timed
        and record.backend.name != registry.REFERENCE
    ]  # fmt: skip


def _earlier(known: Iterable[Record]) -> tuple[set[int], set[int]]:
    """Numbers of the repeats of which cells took turns, and of others of which timed cells ran whole."""
    timed = _timed(known)
    took_turns = {record.repeat for record in timed if record.turns is not None}
    return took_turns, {record.repeat for record in timed} - took_turns


def _why_whole(
    group: Sequence[Cell], device: str, needs: Mapping[str, int], limit: int | None,
    ran_whole: Collection[int],
) -> str | None:  # fmt: skip
    """Why cells are not kept alive at once; None: they are, or there is but one."""
    if len(group) < 2:
        return None
    if group[0].repeat in ran_whole:
        return f"other cells of round {group[0].repeat + 1} did not"
    if device != "cpu":
        return "on GPUs ranks that wait hold memory that the driver may count as that of others"
    needed = sum(needs[cell.key] + PROCESS_BYTES * cell.world_size for cell in group)
    if limit is not None and needed > FILLED * limit:
        return (
            f"alive at once they need {needed / 1e9:,.1f} GB, and {FILLED:.0%} of the free memory are "
            f"{FILLED * limit / 1e9:,.1f} GB"
        )
    return None
