"""Ranks that call different collectives, and ranks that wait for each other at the store."""

import os
import signal
from pathlib import Path

import pytest

from harness.launch.launcher import whole
from harness.record import ErrorPart
from harness.run_directory.assemble import assemble
from harness.run_directory.rank_state import (
    HEAD_BYTES,
    ModuleWriter,
    Position,
    RankState,
    StuckNote,
    late_ranks,
    parting,
    read_modules,
    stuck_error,
)
from harness.run_directory.request import modules_file, rank_state
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
    outcome = whole(launcher.running(folder, request, lambda _: None))
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


DISAGREEMENT = "Detected a disagreement on list length between rank0 and rank1: \n rank0: 2 \n rank1: 3"


def notice_in_deepspeed(rank: Rank) -> None:
    rank.train()
    rank.fail(DISAGREEMENT)


@pytest.mark.parametrize("notice", [abort, notice_in_deepspeed])
def test_the_module_that_idles_on_a_rank_is_named_with_what_to_do(tmp_path: Path, notice: Behaviour) -> None:
    for rank, names in enumerate((["first", "experts.2", "experts.2.up"], ["first", "experts.1"])):
        writer = ModuleWriter(tmp_path, rank)
        writer.begin_step()
        for name in names:
            writer.note(name)
    error = error_of(tmp_path, survive, notice)
    assert error.kind == "CollectiveMismatch"
    assert error.message.startswith(
        "the ranks disagree on a collective: module 'experts.2' runs on rank 0 and not on rank 1; have every "
        "rank run it, on zero rows where it has none, or run ddp:find_unused_parameters=true; with "
        "model.block_class for the module that holds it, zero3:leaf_module=blocks or fsdp1; rank 1 "
    )


def noted(folder: Path, *of_ranks: str) -> str | None:
    for rank, names in enumerate(of_ranks):
        modules_file(folder, rank).write_text("".join(f"{name}\n" for name in names))
    return parting(folder, len(of_ranks))


def test_ranks_part_where_they_run_different_modules_and_not_where_one_is_ahead(tmp_path: Path) -> None:
    assert noted(tmp_path, "abc", "ab", "abc") is None
    assert noted(tmp_path, "", "ab") is None
    assert str(noted(tmp_path, "xyzw", "xyw", "xyzw")).startswith(
        "module 'z' runs on rank 0, 2 and not on rank 1; "
    )
    assert str(noted(tmp_path, "abb", "aab")).startswith("rank 0 runs module 'b' where rank 1 runs 'a'; ")


def test_a_step_that_is_over_leaves_no_note(tmp_path: Path) -> None:
    writer = ModuleWriter(tmp_path, 0)
    writer.begin_step()
    writer.note("first")
    assert read_modules(tmp_path, 0) == ["first"]
    writer.begin_step()
    assert read_modules(tmp_path, 0) == []
    writer.end()
    assert not modules_file(tmp_path, 0).exists()


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
