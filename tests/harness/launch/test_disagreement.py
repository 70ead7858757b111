"""Ranks that call different collectives, and ranks that wait for each other at the store."""

import os
import signal
from pathlib import Path

import pytest

from harness.record import ErrorPart
from harness.run_directory.assemble import assemble
from harness.run_directory.rank_state import HEAD_BYTES, Position, RankState
from harness.run_directory.request import rank_state
from harness.run_directory.stuck import StuckNote, late_ranks, stuck_error
from tests.fake_ranks import Behaviour, FakeLauncher, Rank, a_request

MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
    "pair.cc:456] op.preamble.length <= op.nbytes. 37088 vs 4. Received data size "
    "doesn't match expected size."
)
C10D = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 2100 in _new_process_group_helper'
THREAD = "Current thread 0x00007f (most recent call first):\n"


def error_of(folder: Path, *behaviours: Behaviour) -> ErrorPart:
    request = a_request()
    launcher = FakeLauncher(dict(enumerate(behaviours)))
    outcome = launcher.run(folder, request, on_event=lambda _: None)
    record = assemble(folder, request, outcome)
    assert record.status == "failed"
    assert record.error is not None
    return record.error


def abort(rank: Rank) -> None:
    rank.train()
    rank.log.write_text(MISMATCH)
    os.kill(os.getpid(), signal.SIGABRT)


def raise_it(rank: Rank) -> None:
    rank.train()
    rank.fail(MISMATCH)


def survive(rank: Rank) -> None:
    rank.train()
    rank.miss_a_peer()


@pytest.mark.parametrize("notice", [abort, raise_it])
def test_rank_that_notices_a_disagreement_is_not_blamed_for_it(tmp_path: Path, notice: Behaviour) -> None:
    error = error_of(tmp_path, survive, notice)
    assert (error.kind, error.rank) == ("CollectiveMismatch", None)
    assert "rank 1 received 37088 bytes where it waited for 4" in error.message
    assert [(part.rank, part.step, part.phase) for part in error.ranks] == [
        (0, 2, "backward"),
        (1, 2, "forward"),
    ]


def test_rank_that_others_wait_for_at_the_store_is_late() -> None:
    position = Position(phase="rendezvous", step=None)
    waits = RankState(position=position, stack=THREAD + C10D)
    sleeps = RankState(position=position, stack=THREAD + '  File "own.py", line 3 in sleep\n' + C10D)
    late = late_ranks({0: waits, 1: sleeps}, [])
    assert late is not None
    assert late.ranks == (1,)
    assert late_ranks({0: waits, 1: waits}, []) is None


def write_waiting(folder: Path, rank: int) -> None:
    """The state of a rank that waits in a collective."""
    head = "2 backward".ljust(HEAD_BYTES - 1) + "\n"
    rank_state(folder, rank).write_text(
        head + 'collectives: {"pending": "gloo all_reduce number 41", "enqueued": {"0": 41}}\n'
    )


def test_a_rank_that_cannot_be_seen_is_not_blamed_by_one_that_waits(tmp_path: Path) -> None:
    write_waiting(tmp_path, 0)
    seen = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved"))
    unseen = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved", unseen_ranks=[1]))
    assert (seen.rank, unseen.rank) == (1, None)
    assert "rank 1 may be at fault" in unseen.message


def test_all_in_the_same_collective_is_no_rank_s_fault(tmp_path: Path) -> None:
    for rank in range(2):
        write_waiting(tmp_path, rank)
    error = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved"))
    assert error.rank is None
    assert "all ranks wait in the same collective" in error.message
