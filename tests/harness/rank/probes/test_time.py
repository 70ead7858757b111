"""Phases are summed over micro-steps, by the host's clock and by events of a stream."""

import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from harness.rank.probes.time import (
    Clock,
    CudaPhaseTimer,
    HostPhaseTimer,
    ProcessorAccount,
    accounted_seconds,
    read,
)
from harness.record import OUTSIDE


class FakeEvent:
    """Stands in for torch.cuda.Event: recorded one after the other, a second apart."""

    clock = itertools.count()
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize("timer", [HostPhaseTimer, CudaPhaseTimer])
def test_phases_are_summed_over_micro_steps(
    timer: type[HostPhaseTimer | CudaPhaseTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the clock of the host looks at each border, or events are read pairwise and used again."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", 0)
    taken = timer()
    for _ in range(2):
        for phase in (None, "forward", "backward", None, "forward", "backward", "step", None):
            taken.enter(phase)
        assert taken.take() == {"forward": 2.0, "backward": 2.0, "step": 1.0}
    assert FakeEvent.made == 8 * (timer is CudaPhaseTimer)


@pytest.mark.parametrize("interrupted", range(24))
def test_no_moment_of_a_step_counts_twice_wherever_the_rank_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """Before one look at the clock 100 s go by: fetching and phases are still no longer than their step."""
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: (look := next(looks)) + 100.0 * (look >= interrupted))
    clock = Clock("cpu")
    clock.begin()
    for _ in range(3):
        for phase in ("data", "forward", "backward"):
            clock.enter(phase, last=False)
    clock.enter("step", last=True)
    clock.enter(OUTSIDE, last=True)
    clock.end()
    facts = clock.facts()
    assert facts["data_seconds"] + sum(facts["phase_seconds"].values()) <= facts["seconds"]


def write_proc(proc: Path, *, waits: list[int], user: int, steal: int, ran: int = 10**9) -> None:
    """Files as the kernel writes them: nanoseconds by thread, ticks by column."""
    for number, waited in enumerate(waits):
        task = proc / "self" / "task" / str(number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran} {waited} 17\n")
    (proc / "stat").write_text(f"cpu  {user} 20 30 4000 50 6 7 {steal} 900 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    boot = proc / "sys" / "kernel" / "random"
    boot.mkdir(parents=True, exist_ok=True)
    (boot / "boot_id").write_text("0f0f\n")


def test_differences_of_the_kernel_s_counters_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    write_proc(tmp_path, waits=[10**9, 2 * 10**9], user=1000, steal=10)
    account = ProcessorAccount(tmp_path)
    account.begin()
    write_proc(tmp_path, waits=[2 * 10**9, 4 * 10**9], user=1250, steal=60)
    account.begin()  # of a later timed step
    found = account.end()
    assert found.waiting_seconds == pytest.approx(3.0)
    assert found.machine_busy_seconds == pytest.approx(2.5)
    assert found.machine_stolen_seconds == pytest.approx(0.5)
    assert found.boot == "0f0f"


def test_without_these_accounts_nothing_is_told(tmp_path: Path) -> None:
    account = ProcessorAccount(tmp_path)
    assert account.end() is None, "nothing was timed"
    account.begin()
    assert account.end() is None, "there are none"
    write_proc(tmp_path, waits=[0], user=1, steal=0, ran=0)
    assert read(tmp_path) is None, "the kernel does not count waiting"


@pytest.mark.skipif(sys.platform != "linux", reason="accounts of Linux")
def test_computing_of_all_threads_is_seen_and_sleeping_is_not() -> None:
    if read() is None:
        # Without CONFIG_SCHED_INFO, or in a sandbox that hides schedstat; the tests above read known files.
        pytest.skip("this kernel keeps no accounts")

    def compute() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    account = ProcessorAccount()
    account.begin()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    time.sleep(0.2)
    found = account.end()
    assert found.process_seconds == pytest.approx(0.2, abs=0.05)
    assert found.seconds >= 0.4


def test_a_thread_tells_what_it_ran_and_what_it_was_queued(tmp_path: Path) -> None:
    task = tmp_path / "thread-self"
    task.mkdir()
    (task / "schedstat").write_text("5000 2000000000 17\n")
    before = time.thread_time()
    found = accounted_seconds(tmp_path)
    assert found is not None
    assert before <= found - 2.0 <= time.thread_time()
    (task / "schedstat").write_text("0 0 0\n")
    assert accounted_seconds(tmp_path) is None
    assert accounted_seconds(tmp_path / "missing") is None
