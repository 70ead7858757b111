"""The accounts of Linux, on a copy that is known and on this machine."""

import sys
import threading
import time
from pathlib import Path

import pytest

from harness.rank.probes import time as processor_account
from harness.rank.probes.time import ProcessorAccount, accounted_seconds, read


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
    monkeypatch.setattr(processor_account.os, "sysconf", lambda _: 100)
    write_proc(tmp_path, waits=[10**9, 2 * 10**9], user=1000, steal=10)
    account = ProcessorAccount(tmp_path)
    account.begin()
    write_proc(tmp_path, waits=[2 * 10**9, 4 * 10**9], user=1250, steal=60)
    account.begin()  # of a later timed step
    found = account.end()
    assert found is not None
    assert found.waiting_seconds == pytest.approx(3.0)
    assert found.machine_busy_seconds == pytest.approx(2.5)
    assert found.machine_stolen_seconds == pytest.approx(0.5)
    assert found.boot == "0f0f"


def test_a_system_without_these_accounts_tells_nothing(tmp_path: Path) -> None:
    account = ProcessorAccount(tmp_path)
    account.begin()
    assert account.end() is None


def test_a_kernel_that_does_not_count_waiting_tells_nothing(tmp_path: Path) -> None:
    write_proc(tmp_path, waits=[0], user=1, steal=0, ran=0)
    assert read(tmp_path) is None


def test_nothing_timed_is_nothing_told() -> None:
    assert ProcessorAccount().end() is None


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
    assert found is not None
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
