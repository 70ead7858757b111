"""A failed run names the rank that ended first by itself, however it ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.launch.launcher import whole
from harness.record import Record
from harness.run_directory.assemble import assemble
from harness.run_directory.events import UnsupportedEvent
from tests.fake_ranks import Behaviour, FakeLauncher, Rank, a_request
from tests.patience import SECONDS


def run(folder: Path, first: Behaviour, second: Behaviour) -> Record:
    request = a_request()
    outcome = whole(FakeLauncher([first, second]).running(folder, request, lambda _: None))  # type: ignore[arg-type]
    return assemble(folder, request, outcome)


def survive(rank: Rank) -> None:
    rank.train()
    rank.miss_a_peer()


def leave(code: int) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        os._exit(code)

    return behave


def killed(number: signal.Signals) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        os.kill(os.getpid(), number)
        time.sleep(10)

    return behave


def silent_failure(rank: Rank) -> None:
    """As an exception whose text raises, or a full event file: an exit code and no event."""
    rank.train()
    sys.exit(1)


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        (leave(0), 0, "exit code 0 before it finished"),
        (leave(5), 5, "exit code 5"),
        (leave(74), 74, "could not write its events"),
        (killed(signal.SIGKILL), -9, "SIGKILL"),
        (killed(signal.SIGSEGV), -11, "SIGSEGV"),
        (killed(signal.SIGTERM), 143, "SIGTERM"),
        (silent_failure, 1, "exit code 1"),
    ],
    ids=["exit-0", "exit-5", "events-lost", "SIGKILL", "SIGSEGV", "SIGTERM", "silent"],
)
@pytest.mark.parametrize("at_fault", [0, 1])
def test_rank_that_left_is_blamed_and_not_the_one_that_misses_it(
    tmp_path: Path, behaviour: Behaviour, code: int, said: str, at_fault: int
) -> None:
    behaviours = [survive, survive]
    behaviours[at_fault] = behaviour
    record = run(tmp_path, *behaviours)
    error = record.error
    assert error is not None
    assert record.status == "failed"
    assert (error.rank, error.exit_code, error.kind) == (at_fault, code, "Exit")
    assert said in error.message
    assert (error.step, error.phase) == (2, "forward")
    assert len(record.steps) == 2


def test_exception_of_a_rank_counts_before_the_abort_of_its_peer(tmp_path: Path) -> None:
    def raise_first(rank: Rank) -> None:
        rank.train()
        rank.fail("the data are odd", "ValueError")

    def abort(rank: Rank) -> None:
        rank.train()
        rank.outlive_a_peer(0.3)
        os.abort()

    error = run(tmp_path, abort, raise_first).error
    assert error is not None
    assert (error.rank, error.kind, error.message) == (1, "ValueError", "the data are odd")
    assert (error.step, error.phase) == (2, "backward")


def test_out_of_memory_keeps_its_status(tmp_path: Path) -> None:
    record = run(tmp_path, survive, lambda rank: rank.fail("no memory", "OutOfMemoryError", status="oom"))
    assert record.status == "oom"
    assert record.error is not None
    assert record.error.rank == 1


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def with_child(rank: Rank) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pid.write_text(str(child.pid))
        rank.train()
        os._exit(5)

    run(tmp_path, survive, with_child)
    deadline = time.monotonic() + SECONDS
    child = int(pid.read_text())
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break  # dead, and nobody reaps orphans in this container
        time.sleep(0.02)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def refuse(rank: Rank) -> None:
    rank.position.enter("setup")
    rank.events.write(UnsupportedEvent(reasons=["no plan for it"]))
    os._exit(0)


def test_a_refusal_counts_before_the_peers_that_miss_the_rank(tmp_path: Path) -> None:
    record = run(tmp_path, refuse, lambda rank: rank.miss_a_peer())
    assert (record.status, record.reasons, record.error) == ("unsupported", ["no plan for it"], None)


def test_a_failure_of_its_own_is_not_hidden_by_another_rank_s_refusal(tmp_path: Path) -> None:
    record = run(tmp_path, refuse, lambda rank: rank.fail("the data are odd", "ValueError"))
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.message == "the data are odd"


def out_of_memory(rank: Rank) -> None:
    rank.train()
    rank.fail("CUDA out of memory. Tried to allocate 20.00 MiB.", "OutOfMemoryError", status="oom")


def aborted_by_the_watchdog(rank: Rank) -> None:
    """As NCCL's watchdog ends a rank whose peer is gone."""
    rank.train()
    rank.outlive_a_peer(0.2)
    rank.log.write_text("[rank0]:[E ProcessGroupNCCL.cpp:2068] Process group watchdog thread terminated\n")
    os.abort()


def aborted_out_of_memory(rank: Rank) -> None:
    """As a thread of NCCL that finds no memory ends the process."""
    rank.train()
    time.sleep(0.1)
    rank.log.write_text(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  NCCL error: unhandled cuda error, Failed to CUDA calloc async 608 bytes\n"
    )
    os.abort()


@pytest.mark.parametrize("behaviour", [out_of_memory, aborted_out_of_memory])
@pytest.mark.parametrize("at_fault", [0, 1])
def test_a_rank_out_of_memory_is_blamed_and_not_the_peer_that_the_watchdog_aborts(
    tmp_path: Path, behaviour: Behaviour, at_fault: int
) -> None:
    behaviours = [aborted_by_the_watchdog, aborted_by_the_watchdog]
    behaviours[at_fault] = behaviour
    record = run(tmp_path, *behaviours)
    assert record.error is not None
    assert (record.status, record.error.rank) == ("oom", at_fault)
