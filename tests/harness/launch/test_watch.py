"""Ranks that stand still are found in steps and seconds, and the record says where each of them is."""

import ctypes
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.launch.watch import Idleness, StartWatch
from harness.record import ErrorPart, Record
from harness.run_directory.assemble import assemble
from harness.run_directory.rank_state import Position, RankState
from harness.run_directory.stuck import late_ranks
from tests.fake_ranks import Behaviour, FakeLauncher, Rank, a_request

IMPATIENT = {"stuck_after_seconds": 1.0, "phase_timeout_seconds": 20.0, "timeout_seconds": 30.0}


def run(folder: Path, *behaviours: Behaviour, **limits: float | None) -> Record:
    request = a_request(len(behaviours), **(limits or IMPATIENT))
    outcome = FakeLauncher(dict(enumerate(behaviours))).run(folder, request, on_event=lambda _: None)
    return assemble(folder, request, outcome)


def wait_for_peers(rank: Rank) -> None:
    rank.train()
    rank.position.enter("backward")
    rank.wait_forever()


def sleep_in_forward(rank: Rank) -> None:
    rank.train()
    time.sleep(60)


def stop(rank: Rank) -> None:
    rank.train()
    os.kill(os.getpid(), signal.SIGSTOP)


def error_of(record: Record) -> ErrorPart:
    assert record.error is not None
    return record.error


def test_rank_that_sleeps_is_found_with_step_phase_and_the_stacks_of_all(tmp_path: Path) -> None:
    record = run(tmp_path, wait_for_peers, sleep_in_forward)
    error = error_of(record)
    assert (record.status, error.kind, error.rank) == ("timeout", "Stuck", 1)
    assert (error.step, error.phase) == (2, "forward")
    assert "10 steps of 0.01 s and 1 s" in error.message
    assert [(part.rank, part.step, part.phase) for part in error.ranks] == [
        (0, 2, "backward"),
        (1, 2, "forward"),
    ]
    assert "wait_forever" in error.ranks[0].stack
    assert "sleep_in_forward" in error.ranks[1].stack


def test_rank_that_is_stopped_is_blamed_though_it_cannot_say_where_it_is(tmp_path: Path) -> None:
    error = error_of(run(tmp_path, wait_for_peers, stop))
    assert error.rank == 1
    assert "SIGSTOP" in error.message
    assert error.ranks[1].stack == ""
    assert "SIGSTOP" in error.ranks[1].note
    assert "wait_forever" in error.ranks[0].stack


def test_timeout_also_says_where_the_ranks_are(tmp_path: Path) -> None:
    record = run(tmp_path, wait_for_peers, sleep_in_forward, timeout_seconds=0.7)
    error = error_of(record)
    assert (record.status, error.kind, error.rank, error.phase) == ("timeout", "Timeout", 1, "forward")
    assert "runtime.timeout_seconds" in error.message
    assert "sleep_in_forward" in error.ranks[1].stack


def test_run_may_last_as_long_as_its_steps_need_at_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_moving(rank: Rank) -> None:
        rank.train()
        for batch in range(10_000):
            rank.position.enter(f"answers, batch {batch} of 10000")
            time.sleep(0.01)

    monkeypatch.setattr("harness.launch.watch.LEAST_SECONDS", 2.0)
    record = run(tmp_path, keep_moving, keep_moving, timeout_seconds=None)
    error = error_of(record)
    assert (record.status, error.kind, len(record.steps)) == ("timeout", "Timeout", 2)
    assert "more than 2 s and 3 times the 0 s that its steps need" in error.message


def test_pace_of_a_run_counts_what_lies_between_its_steps(tmp_path: Path) -> None:
    """Two steps a second apart, of four: nothing is overdue, although each takes a hundredth of it."""

    def slow_between(rank: Rank) -> None:
        rank.train(1)
        time.sleep(1.5)
        rank.train(1)
        time.sleep(3)
        rank.done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.launch.watch.LEAST_SECONDS", 0.0)
        assert run(tmp_path, slow_between, slow_between, timeout_seconds=None).error is None


def test_phases_outside_of_steps_have_an_allowance_of_their_own(tmp_path: Path) -> None:
    """A checkpoint that lasts longer than the limit of steps, and a start of which no step is known."""

    def slow_start(rank: Rank) -> None:
        rank.position.enter("setup")
        time.sleep(1.5)
        rank.train()
        rank.position.enter("checkpoint")
        time.sleep(1.5)
        rank.done()

    record = run(
        tmp_path, slow_start, slow_start,
        stuck_after_steps=1, stuck_after_seconds=0.2, phase_timeout_seconds=20,
    )  # fmt: skip
    assert record.status == "ok"


def test_rank_that_stays_behind_in_its_start_is_found_by_what_the_others_needed(tmp_path: Path) -> None:
    def ahead(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.wait_forever()

    def behind(rank: Rank) -> None:
        rank.position.enter("load data")
        time.sleep(60)

    record = run(tmp_path, ahead, behind, start_timeout_seconds=2)
    error = error_of(record)
    assert (record.status, error.kind, error.rank, error.phase) == ("timeout", "Stuck", 1, "load data")
    assert "rank 1 has been in 'load data'" in error.message
    assert "runtime.start_timeout_seconds, 2)" in error.message
    assert "in behind" in error.ranks[1].stack


def test_ranks_that_do_nothing_in_one_phase_are_found_and_those_that_work_are_not(tmp_path: Path) -> None:
    def waiting(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.wait_forever()

    def working(rank: Rank) -> None:
        rank.position.enter("setup")
        end = time.monotonic() + 4
        while time.monotonic() < end:
            pass
        rank.done()

    busy, idle = tmp_path / "busy", tmp_path / "idle"
    for folder in (busy, idle):
        folder.mkdir()
    assert run(busy, working, working, idle_timeout_seconds=2).status == "ok"
    record = run(idle, waiting, waiting, idle_timeout_seconds=2)
    assert (record.status, error_of(record).phase) == ("timeout", None)
    assert "no rank moved, computed, read or wrote" in error_of(record).message
    assert "waiting" in error_of(record).ranks[0].stack


FACTORY = "model.factory 'm.py:build'"


def test_factory_that_hangs_on_one_rank_is_named_and_not_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    def hangs(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.position.hear({"doing": FACTORY})
        time.sleep(60)

    def waits(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.wait_forever()

    error = error_of(run(tmp_path, hangs, waits, idle_timeout_seconds=2))
    assert (error.kind, error.rank, error.phase) == ("Stuck", 0, "setup")
    said = f"rank 0 is in code of the job's own, which has not returned (setup, in {FACTORY})"
    assert said in error.message
    assert "in hangs" in error.ranks[0].stack


def test_factory_that_hangs_on_every_rank_is_named(tmp_path: Path) -> None:
    def hangs(rank: Rank) -> None:
        rank.position.enter("load data")
        rank.position.hear({"doing": FACTORY})
        time.sleep(60)

    error = error_of(run(tmp_path, hangs, hangs, idle_timeout_seconds=2))
    assert (error.kind, error.rank) == ("Stuck", None)
    assert f"code of the job's own has not returned (load data, in {FACTORY})" in error.message


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: os._exit(0), f"{FACTORY} ended the rank with exit code 0; return what it makes instead"),
        (lambda: os._exit(7), f"{FACTORY} ended the rank with exit code 7; return what it makes instead"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), f"the rank was killed in {FACTORY} by SIGKILL"),
    ],
)
def test_factory_that_ends_its_rank_is_named(tmp_path: Path, leave: Callable[[], None], said: str) -> None:
    def leaves(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.position.hear({"doing": FACTORY})
        leave()

    def waits(rank: Rank) -> None:
        rank.position.hear({"doing": FACTORY})
        rank.position.hear({"doing": None})
        rank.miss_a_peer()

    error = error_of(run(tmp_path, waits, leaves))
    assert (error.rank, error.phase) == (1, "setup")
    assert error.message.startswith(said)


def starved() -> None:
    """Computes on a processor that another process, of higher rank, has for itself."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def waiting_for_the_disk() -> None:
    """Cannot be interrupted, as in a read from a server that is gone: the parent of `vfork` waits so."""
    clone, vfork = 56, 0x4000
    if ctypes.CDLL(None).syscall(clone, vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(60)


def asleep() -> None:
    time.sleep(60)


def busy() -> None:
    while True:
        pass


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers")
@pytest.mark.parametrize(("rank", "idles"), [(starved, False), (waiting_for_the_disk, False), (asleep, True)])
def test_who_has_no_processor_or_waits_for_the_disk_does_not_idle(
    rank: Callable[[], None], idles: bool
) -> None:
    context, processor = multiprocessing.get_context("fork"), min(os.sched_getaffinity(0))
    processes = [context.Process(target=target) for target in (busy, rank)]
    for process in processes:
        process.start()
        os.sched_setaffinity(process.pid or 0, {processor})
    try:
        idleness = Idleness(lambda: {0: processes[1].pid or 0})
        started = time.monotonic()
        while time.monotonic() < started + 2:
            time.sleep(0.5)
            idle = idleness.seconds(time.monotonic())
        assert (idle > 1) == idles
    finally:
        for member in psutil.Process().children(recursive=True):
            member.kill()
        for process in processes:
            process.join()


def test_an_evaluation_batch_may_last_as_long_as_steps_do(tmp_path: Path) -> None:
    def hangs(rank: Rank) -> None:
        rank.train()
        rank.position.enter("evaluation, sample 8")
        rank.wait_forever()

    error = error_of(run(tmp_path, hangs, hangs))
    assert "10 steps of 0.01 s and 1 s" in error.message
    assert error.ranks[0].phase == "evaluation, sample 8"


def test_late_ranks_of_the_start_are_judged_phase_by_phase() -> None:
    watch = StartWatch(3, 60.0, now=0.0)
    watch.note({0: "start", 1: None, 2: "start"}, now=10.0)
    watch.note({0: "load data", 1: "setup", 2: "rendezvous"}, now=30.0)
    assert watch.late(now=90.0) is None  # others needed 30 s for the start; nobody left 'load data'
    watch.note({0: "data", 1: "data", 2: "rendezvous"}, now=130.0)
    late = watch.late(now=130.0)
    assert late is not None
    assert late.startswith("rank 2 has been in 'rendezvous' for 100 s, where others needed 0 s")
    watch.forgive(now=130.0)
    assert watch.late(now=131.0) is None
    watch.note({0: "data", 1: "data", 2: "data"}, now=140.0)
    assert watch.late(now=9999.0) is None


def test_rank_whose_position_cannot_be_seen_is_not_late() -> None:
    watch = StartWatch(2, 60.0, now=0.0)
    watch.note({0: "setup"}, now=10.0)
    assert watch.late(now=9999.0) is None


def state(phase: str, step: int = 3, collective: str | None = None, begun: int = 0) -> RankState:
    enqueued = {"0": begun} if begun else {}
    return RankState(position=Position(phase=phase, step=step), collective=collective, enqueued=enqueued)


@pytest.mark.parametrize(
    ("states", "late"),
    [
        ([state("backward"), state("forward")], (1,)),
        ([state("forward", 4), state("step", 3)], (1,)),
        ([state("backward", collective="gloo all_reduce"), state("backward")], (1,)),
        ([state("forward", collective="a", begun=7), state("forward", collective="b", begun=6)], (1,)),
        ([state("forward", collective="a", begun=7), state("backward", collective="b", begun=7)], None),
        ([state("forward"), state("forward")], None),
        ([RankState(), RankState()], None),
    ],
)
def test_the_rank_that_did_not_arrive_follows_from_collectives_then_positions(
    states: list[RankState], late: tuple[int, ...] | None
) -> None:
    found = late_ranks(dict(enumerate(states)), [])
    assert (found.ranks if found else None) == late
