"""Ranks of torchrun that end before they agreed on a run leave a record; here without torch."""

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.launch.external import supervise
from harness.record import Record
from harness.record.store import read_record
from tests.fake_ranks import a_request

Behaviour = Callable[[], None]


def launch(runs: Path, behaviours: list[Behaviour]) -> list[Record]:
    """What torchrun does, whose ranks never tell a run's id; the records that are left."""

    def live(rank: int) -> None:
        def become(_tell: Callable[[str], None]) -> int:
            behaviours[rank]()
            return 1

        supervisor = supervise(rank, len(behaviours), runs, become)
        supervisor.early_record(lambda: a_request(len(behaviours)))
        supervisor.leave()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=live, args=(rank,)) for rank in range(len(behaviours))]
    for process in processes:
        process.start()
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.terminate()
        time.sleep(0.05)
    return [read_record(path) for path in runs.glob("*/record.json")]


def wait_for_peers() -> None:
    time.sleep(20)


def cannot_connect() -> None:
    raise ConnectionError("the server of the rendezvous cannot be reached")


def killed() -> None:
    faulthandler.disable()  # else pytest's handler prints a crash that is not its own
    os.kill(os.getpid(), signal.SIGSEGV)


def out_of_memory() -> None:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("behaviour", "status", "kind", "said"),
    [
        (cannot_connect, "failed", "ConnectionError", "the server of the rendezvous cannot be reached"),
        (killed, "failed", "Exit", "killed by SIGSEGV"),
        (out_of_memory, "oom", "RuntimeError", "out of memory"),
    ],
)
def test_a_rank_that_ends_early_leaves_a_record(
    tmp_path: Path, behaviour: Behaviour, status: str, kind: str, said: str
) -> None:
    (record,) = launch(tmp_path, [wait_for_peers, behaviour])
    assert record.error is not None
    assert (record.status, record.error.kind, record.error.rank) == (status, kind, 1)
    assert said in record.error.message


def test_ranks_that_end_together_leave_one_record(tmp_path: Path) -> None:
    assert len(launch(tmp_path, [cannot_connect] * 3)) == 1


def test_a_launch_that_is_cancelled_leaves_none(tmp_path: Path) -> None:
    def cancelled() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(20)

    assert launch(tmp_path, [cancelled]) == []
