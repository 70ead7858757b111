"""How the ranks of a run ended that torchrun started, as far as their monitors noted it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from harness.run_directory.assemble import Outcome
from harness.run_directory.events import RankEvents, has_ended_well, has_said_its_end, read_events
from harness.run_directory.rank_state import Owner, read_part
from harness.run_directory.request import RankExit, rank_exit, rank_owner
from harness.run_directory.stuck import StuckNote

PATIENCE_SECONDS = 2.0
"""Monitors note an end at once; a file system shows the note a little later."""
TOGETHER_SECONDS = 1.0
"""Ranks that were all told to end within this time were told by their launcher."""


def wait_for_ends(run_directory: Path, world_size: int) -> None:
    """Return when every rank has said or is known to have ended, or after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        # Last lines only: all events of 64 ranks and 1,000 steps take seconds to read.
        if all(has_said_its_end(run_directory, r) or _is_known(run_directory, r) for r in range(world_size)):
            return
        time.sleep(0.1)


def noted_exits(run_directory: Path, ranks: Iterable[int]) -> dict[int, RankExit]:
    """How ranks ended as their monitors noted it, the first to end first."""
    notes = {rank: read_part(rank_exit(run_directory, rank), RankExit) for rank in ranks}
    known = {rank: note for rank, note in notes.items() if note is not None}
    return dict(sorted(known.items(), key=lambda item: (item[1].at, item[0])))


def external_outcome(run_directory: Path, world_size: int) -> Outcome:
    """The exits that monitors noted, and which ranks vanished with their monitors."""
    noted = noted_exits(run_directory, range(world_size))
    events, _ = read_events(run_directory, world_size)
    vanished = frozenset(
        rank
        for rank, of_rank in events.items()
        if rank not in noted and not of_rank.has_ended and is_gone(run_directory, rank)
    )
    outcome = Outcome(
        exit_codes={rank: end.exit_code for rank, end in noted.items()},
        ended_at={rank: end.at for rank, end in noted.items()},
        vanished=vanished,
    )
    return Outcome(exit_codes={}, stopped="interrupted") if _told_to_end(events, outcome) else outcome


def is_gone(run_directory: Path, rank: int) -> bool:
    """Whether the monitor of a rank is known to have ended."""
    owner = read_part(rank_owner(run_directory, rank), Owner)
    return owner is not None and owner.is_gone


def has_gone(run_directory: Path, rank: int) -> bool:
    """Whether a rank, or its monitor with it, is known to have ended before the rank was done."""
    return _is_known(run_directory, rank) and not has_ended_well(run_directory, rank)


def exits_before_stuck(run_directory: Path, note: StuckNote) -> Outcome:
    """Of a run whose ranks had to be ended: the exits of those that had ended by themselves before."""
    noted = noted_exits(run_directory, note.gone_ranks)
    return Outcome(
        exit_codes={rank: end.exit_code for rank, end in noted.items()},
        ended_at={rank: end.at for rank, end in noted.items()},
        stopped="stuck",
    )


def _is_known(run_directory: Path, rank: int) -> bool:
    return rank_exit(run_directory, rank).exists() or is_gone(run_directory, rank)


def _told_to_end(events: dict[int, RankEvents], outcome: Outcome) -> bool:
    """Whether all ranks were told to end at once, as by a user or a scheduler."""
    told = [of_rank.stopped.at for of_rank in events.values() if of_rank.stopped is not None]
    return len(told) == len(events) > 0 and not outcome.vanished and max(told) - min(told) < TOGETHER_SECONDS
