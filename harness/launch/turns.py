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
AUTO = 1
"""Timed steps of a turn where `compare.turns` is auto."""


def take_turns(
    runs: Mapping[str, InTurns[Record]], steps: int, on_turn: Callable[[str], None]
) -> Generator[tuple[str, Record]]:
    """The record of each cell as it ends, by its key; `on_turn` is told which one goes on.

    Where one is interrupted, all that have begun are, each with its record.
    """
    waiting: dict[str, str] = {}
    with leaving_none_behind():
        try:
            for key, place in _order(runs, waiting):
                on_turn(key)
                record = _go_on(runs[key], key, waiting, steps, place)
                if record is not None:
                    yield key, record
                    if record.was_interrupted:
                        break
        except KeyboardInterrupt:  # between two turns
            pass
        except BaseException:
            for run in runs.values():
                run.close()
            raise
        for key in waiting:
            try:
                runs[key].throw(KeyboardInterrupt())
            except StopIteration as end:
                yield key, end.value


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
    return None


def groups(
    cells: Sequence[Cell], turns: int | None, device: str, parts: Mapping[str, PredictionPart],
    unknown: Collection[str], ran_whole: Collection[int], say: Callable[[str], None],
) -> list[list[Cell]]:  # fmt: skip
    """The cells in the order they run; those of one list take turns. `say` is told why some do not.

    All of a round do where they fit together, so that numbers of ranks can be compared too; else those of
    one number of ranks. `parts`: by cell, what its run is predicted to need; `unknown`: cells of which that
    cannot be predicted. Others without a prediction will not run. `ran_whole`: rounds of which cells ran
    whole before.
    """
    rounds: dict[object, list[Cell]] = {}
    told: dict[str, None] = {}
    for cell in cells:
        part = parts.get(cell.key)
        takes_turns = turns is not None and is_timed_beside_others(cell)
        if takes_turns and cell.key in unknown:
            told[f"{cell.backend} on {cell.world_size} ranks runs whole: its memory is unknown"] = None
        is_one = takes_turns and part is not None and not part.refused
        rounds.setdefault(cell.repeat if is_one else cell.key, []).append(cell)
    divided: list[list[Cell]] = []
    for together in rounds.values():
        if _why_whole(together, device, parts, ran_whole) is None:
            divided.append(together)
            continue
        of_size: dict[int, list[Cell]] = {}
        for cell in together:
            of_size.setdefault(cell.world_size, []).append(cell)
        for size, group in of_size.items():
            why = _why_whole(group, device, parts, ran_whole)
            divided += [group] if why is None else [[cell] for cell in group]
            if why is not None:
                told[f"cells on {size} ranks run whole: {why}"] = None
    for text in told:
        say(f"compare.turns: {text}")
    return divided


def rounds_run_whole(records: Iterable[Record]) -> set[int]:
    """Numbers of the repeats of which a timed run that is no reference took no turns."""
    return {
        record.repeat
        for record in records
        if record.turns is None
        and record.windows is not None
        and record.windows.timed
        and record.backend.name != registry.REFERENCE
    }


def is_timed_beside_others(cell: Cell) -> bool:
    """Whether a cell may take turns at all: references are alone, and repetitions for rounding not timed."""
    return cell.measure.timed and registry.parse(cell.backend)[0].name != registry.REFERENCE


def _why_whole(
    group: Sequence[Cell], device: str, parts: Mapping[str, PredictionPart], ran_whole: Collection[int]
) -> str | None:
    """Why cells are not kept alive at once; None: they are, or there is but one."""
    if len(group) < 2:
        return None
    if group[0].repeat in ran_whole:
        return "others of their round did"
    if device != "cpu":
        return "on GPUs ranks that wait hold memory that the driver may count as that of others"
    known = [parts[cell.key] for cell in group]
    needed = sum(part.host_bytes for part in known) + PROCESS_BYTES * sum(cell.world_size for cell in group)
    limits = [part.host_limit_bytes for part in known if part.host_limit_bytes is not None]
    if limits and needed > FILLED * min(limits):
        return (
            f"alive at once they need {needed / 1e9:,.1f} GB, and {FILLED:.0%} of the free memory are "
            f"{FILLED * min(limits) / 1e9:,.1f} GB"
        )
    return None
