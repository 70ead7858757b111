"""Ranks that stand still are found in steps and seconds, and the record says where each of them is."""

import ctypes
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.launch import watch
from harness.launch.watch import Idleness, Watch
from harness.run_directory.events import StepEvent
from harness.run_directory.rank_state import Position, PositionWriter, RankState, late_ranks, read_position
from harness.snapshots.flight_recorder import Hang
from tests.fake_ranks import STEP, Behaviour, Rank, a_request, failure_of, wait_for_peers
from tests.patience import until

IMPATIENT = {"stuck_after_seconds": 1.0, "phase_timeout_seconds": 20.0, "timeout_seconds": 30.0}
USED = watch._Usage(processor_seconds=1.0, moved_bytes=0, wants_to_go_on=False)


class Watched:
    """A watch of two ranks, whose clock goes on only when a test says so."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **limits: float | None) -> None:
        self._now = 0.0
        patch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self._now))
        self._ranks = [PositionWriter(folder, rank) for rank in range(2)]
        self._watch = Watch(folder, a_request(2, **limits), lambda: {0: 1, 1: 2})

    def enter(self, phase: str) -> None:
        for rank in self._ranks:
            rank.enter(phase)

    def step(self, number: int) -> None:
        """Of a hundredth of a second, then the next begins."""
        self._watch.note(StepEvent(step=number, seconds=0.01, **STEP))
        for rank in self._ranks:
            rank.begin_step(number + 1)
        self.enter("forward")

    def after(self, seconds: int) -> str | None:
        """Why the ranks must be ended while they stay so, looked at once a second; None: they need not."""
        for _ in range(seconds):
            self._now += 1
            if (note := self._watch.must_end()) is not None:
                return f"{note.kind}: {note.reason}"
        return None


def sleep_in_forward(rank: Rank) -> None:
    rank.train()
    time.sleep(60)


def stop(rank: Rank) -> None:
    rank.train()
    os.kill(os.getpid(), signal.SIGSTOP)


def test_rank_that_sleeps_is_found_with_step_phase_and_the_stacks_of_all(tmp_path: Path) -> None:
    record, error = failure_of(tmp_path, wait_for_peers, sleep_in_forward, **IMPATIENT)
    assert (record.status, error.kind, error.rank) == ("timeout", "Stuck", 1)
    assert (error.step, error.phase) == (2, "forward")
    assert "10 steps of 0.01 s and 1 s" in error.message
    assert [(part.rank, part.step, part.phase) for part in error.ranks] == [
        (0, 2, "backward"),
        (1, 2, "forward"),
    ]
    assert "wait_forever" in error.ranks[0].stack
    assert "sleep_in_forward" in error.ranks[1].stack
    helpers = [name for name in ("answer_signals", "wait_and_leave") for p in error.ranks if name in p.stack]
    assert helpers == []  # threads that only wait say nothing of why a rank is stuck


def test_rank_that_is_stopped_is_blamed_though_it_cannot_say_where_it_is(tmp_path: Path) -> None:
    _, error = failure_of(tmp_path, wait_for_peers, stop, **IMPATIENT)
    assert error.rank == 1
    assert "SIGSTOP" in error.message
    assert error.ranks[1].stack == ""
    assert "SIGSTOP" in error.ranks[1].note
    assert "wait_forever" in error.ranks[0].stack


def test_timeout_also_says_where_the_ranks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        """A thousand seconds later once both ranks are where they stay."""
        positions = [read_position(tmp_path, rank) for rank in range(2)]
        there = [p.phase for p in positions if p and p.step == 2] == ["backward", "forward"]
        return time.monotonic() + 1000 * there

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    record, error = failure_of(tmp_path, wait_for_peers, sleep_in_forward, timeout_seconds=900.0)
    assert (record.status, error.kind, error.rank, error.phase) == ("timeout", "Timeout", 1, "forward")
    assert "runtime.timeout_seconds" in error.message
    assert "sleep_in_forward" in error.ranks[1].stack


def test_run_may_last_as_long_as_its_steps_need_at_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four steps two, a second apart although each takes a hundredth of it: what lies between counts."""
    monkeypatch.setattr(watch, "LEAST_SECONDS", 2.0)
    watched = Watched(tmp_path, monkeypatch)
    watched.step(0)
    assert watched.after(1) is None
    watched.step(1)
    for batch in range(13):  # until 2 + 3 x 4 seconds have passed
        watched.enter(f"answers, batch {batch} of 10000")
        assert watched.after(1) is None
    watched.enter("answers, batch 13 of 10000")
    said = watched.after(1)
    assert said.startswith("Timeout: 15 s passed, more than 2 s and 3 times the 4 s that its steps need")


def test_phases_outside_of_steps_have_an_allowance_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that lasts longer than the limit of steps, and a start of which no step is known."""
    monkeypatch.setattr(watch, "_usage", lambda _: USED)
    limits = {"stuck_after_steps": 1, "stuck_after_seconds": 0.2, "phase_timeout_seconds": 20}
    watched = Watched(tmp_path, monkeypatch, **limits)
    watched.enter("setup")
    assert watched.after(20) is None
    watched.step(0)
    assert watched.after(1) is None
    watched.enter("checkpoint")
    assert watched.after(20) is None
    watched.step(1)
    said = watched.after(3)
    assert said == "Stuck: no rank made progress for 1 s (the limit is 0.2 s: 1 steps of 0.01 s and 0.2 s)"


def test_rank_that_sleeps_in_its_start_while_others_wait_is_found(tmp_path: Path) -> None:
    def ahead(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.wait_forever()

    def behind(rank: Rank) -> None:
        rank.position.enter("load data")
        time.sleep(60)

    record, error = failure_of(tmp_path, ahead, behind, idle_timeout_seconds=2)
    assert (record.status, error.kind, error.rank, error.phase) == ("timeout", "Stuck", 1, "load data")
    assert "runtime.idle_timeout_seconds is 2)" in error.message
    assert "in behind" in error.ranks[1].stack


@pytest.mark.parametrize(
    ("a_second", "found"),
    [
        ({}, True), ({"processor_seconds": 0.09}, True), ({"processor_seconds": 0.5}, False),
        ({"moved_bytes": 2**21}, False), ({"wants_to_go_on": 1}, False),
    ],
)  # fmt: skip
def test_ranks_that_do_nothing_in_one_phase_are_found_and_those_that_work_are_not(
    a_second: dict[str, float], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = vars(USED).copy()
    monkeypatch.setattr(watch, "_usage", lambda _: watch._Usage(**used))
    watched = Watched(tmp_path, monkeypatch, idle_timeout_seconds=60)
    watched.enter("setup")
    for _ in range(80):
        used |= {name: used[name] + more for name, more in a_second.items()}
        if (said := watched.after(1)) is not None:
            break
    assert (said is not None) == found
    assert said is None or said.startswith("Stuck: no rank made progress, computed, read or wrote for 60 s")


FACTORY = "model.factory 'm.py:build'"


def within_factory(phase: str, then: Callable[[], None] = lambda: time.sleep(60)) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.position.enter(phase)
        rank.position.hear({"doing": FACTORY})
        then()

    return behave


def test_factory_that_hangs_is_named_and_not_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    def waits(rank: Rank) -> None:
        rank.position.enter("setup")
        rank.wait_forever()

    one, every = tmp_path / "one", tmp_path / "every"
    one.mkdir()
    every.mkdir()
    _, error = failure_of(one, within_factory("setup"), waits, idle_timeout_seconds=2)
    assert (error.kind, error.rank, error.phase) == ("Stuck", 0, "setup")
    said = f"rank 0 is in code of the job's own, which has not returned (setup, in {FACTORY})"
    assert said in error.message
    assert "in behave" in error.ranks[0].stack
    hangs = within_factory("load data")
    _, error = failure_of(every, hangs, hangs, idle_timeout_seconds=2)
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
    def waits(rank: Rank) -> None:
        rank.position.hear({"doing": FACTORY})
        rank.position.hear({"doing": None})
        rank.miss_a_peer()

    _, error = failure_of(tmp_path, waits, within_factory("setup", leave), **IMPATIENT)
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


def is_so(rank: Callable[[], None], process: int) -> bool:
    if rank is starved:
        return os.sched_getscheduler(process) == os.SCHED_IDLE
    wanted = psutil.STATUS_SLEEPING if rank is asleep else psutil.STATUS_DISK_SLEEP
    return psutil.Process(process).status() == wanted


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
        until(lambda: is_so(rank, processes[1].pid or 0))
        idleness = Idleness(lambda: {0: processes[1].pid or 0})
        assert [idleness.seconds(float(now)) for now in (0, 1, 2)] == ([0, 1, 2] if idles else [0, 0, 0])
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

    _, error = failure_of(tmp_path, hangs, hangs, **IMPATIENT)
    assert "10 steps of 0.01 s and 1 s" in error.message
    assert error.ranks[0].phase == "evaluation, sample 8"


THREAD = "Current thread 0x00007f (most recent call first):\n"
C10D = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 2100 in _new_process_group_helper'
AT_THE_STORE = RankState(position=Position(phase="rendezvous", step=None), stack=THREAD + C10D)


def state(phase: str, step: int = 3, collective: str | None = None) -> RankState:
    return RankState(position=Position(phase=phase, step=step), collective=collective)


@pytest.mark.parametrize(
    ("states", "late"),
    [
        ([state("backward"), state("forward")], (1,)),
        ([state("forward", 4), state("step", 3)], (1,)),
        ([state("backward", collective="gloo all_reduce"), state("backward")], (1,)),
        ([state("forward", collective="a"), state("forward", collective="b")], (0,)),
        ([state("forward"), state("forward")], None),
        ([RankState(), RankState()], None),
        (
            [AT_THE_STORE, replace(AT_THE_STORE, stack=f'{THREAD}  File "own.py", line 3 in sleep\n{C10D}')],
            (1,),
        ),
        ([AT_THE_STORE, AT_THE_STORE], None),
    ],
)
def test_the_rank_that_did_not_arrive_follows_from_collectives_then_positions(
    states: list[RankState], late: tuple[int, ...] | None
) -> None:
    hang = Hang(verdict="rank 0 is in another group", culprits=(0,), waits=(), missing=())
    found = late_ranks(dict(enumerate(states)), [], hang=hang)
    assert (found.ranks if found else None) == late
