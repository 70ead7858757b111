"""Ranks that torchrun started leave a record whichever of them is killed; here without torch."""

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.files import write_atomically
from harness.launch.external import claimed, forget_dead_claims, supervise
from harness.record import ErrorPart, Record
from harness.record.store import read_record
from harness.run_directory.request import rank_exit, rank_file, rank_owner
from tests.events import steps_taken
from tests.fake_ranks import Behaviour, Rank, a_request, has_ended, wait_for_peers
from tests.patience import SECONDS, until


def launch(
    runs: Path, behaviours: list[Behaviour], others: Path | None = None, **limits: float
) -> list[multiprocessing.process.BaseProcess]:
    """What torchrun does: one process per rank; all but rank 0 write into `others`, if it is given."""
    request = a_request(len(behaviours), **({"stuck_after_seconds": 1, "phase_timeout_seconds": 20} | limits))
    for folder in {runs, others or runs}:
        (folder / request.run_id).mkdir(parents=True)
        request.write(folder / request.run_id)

    def live(rank: int) -> None:
        runs = first if rank == 0 or others is None else others

        def become(tell: Callable[[str], None]) -> int:
            tell(request.run_id)
            behaviours[rank](Rank(runs / request.run_id, rank))
            return 0

        supervisor = supervise(rank, len(behaviours), runs, become)
        supervisor.missing_record()
        supervisor.leave()

    first = runs
    return started(len(behaviours), live)


def started(count: int, live: Callable[[int], None]) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=live, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    return list(processes)


def end_by_themselves(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """As on nodes whose launcher or network does not tell the others that a rank is gone."""
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode is not None


def end(processes: list[multiprocessing.process.BaseProcess]) -> list[int | None]:
    """As torchrun: when one process has failed, terminate the others."""

    def over() -> bool:
        if any(p.exitcode not in (None, 0) for p in processes):
            for process in processes:
                process.terminate()
        return all(p.exitcode is not None for p in processes)

    until(over)
    return [process.exitcode for process in processes]


def record_of(runs: Path) -> tuple[Record, ErrorPart]:
    record = read_record(runs / "run" / "record.json")
    assert record.error is not None
    return record, record.error


LEAVING = "leaving"
"""The file of a rank that trained and is about to go: the process that ends then."""


def leave_behind(rank: Rank, process: int) -> None:
    """Say so once every rank trains under its monitor: launchers end the others, however far these are."""
    until(lambda: all(rank_owner(rank.folder, other).exists() for other in range(2)))
    until(lambda: [steps_taken(rank_file(rank.folder, other)) for other in range(2)] == [2, 2])
    write_atomically(rank.folder / LEAVING, str(process))


def survive(rank: Rank) -> None:
    """Miss the peer when it has gone: a busy machine may let it live on after it said so."""
    rank.train()
    until((rank.folder / LEAVING).exists)
    peer = int((rank.folder / LEAVING).read_text())
    until(lambda: has_ended(peer))
    rank.miss_a_peer()


def killed(rank: Rank) -> None:
    rank.train()
    leave_behind(rank, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_its_monitor(rank: Rank) -> None:
    rank.train()
    leave_behind(rank, os.getppid())
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def left(rank: Rank) -> None:
    rank.train()
    leave_behind(rank, os.getpid())
    os._exit(0)


@pytest.mark.parametrize(
    ("behaviour", "at_fault", "code", "survivor"),
    [
        (killed, 0, -9, survive),
        (killed, 0, -9, wait_for_peers),
        (killed, 1, -9, survive),
        (left, 0, 0, survive),
        (killed_with_its_monitor, 0, None, survive),
        (killed_with_its_monitor, 0, None, wait_for_peers),
    ],
)
def test_killed_rank_is_blamed_whoever_writes_the_record(
    tmp_path: Path, behaviour: Behaviour, at_fault: int, code: int | None, survivor: Behaviour
) -> None:
    behaviours = [survivor, survivor]
    behaviours[at_fault] = behaviour
    end(launch(tmp_path, behaviours, stuck_after_seconds=60))
    record, error = record_of(tmp_path)
    assert record.status == "failed"
    assert (error.rank, error.exit_code, error.step, error.phase) == (at_fault, code, 2, "forward")


def test_rank_that_was_killed_is_the_cause_though_its_peer_never_hears_of_it(tmp_path: Path) -> None:
    end_by_themselves(launch(tmp_path, [wait_for_peers, killed]))
    record, error = record_of(tmp_path)
    assert (record.status, error.kind) == ("failed", "Exit")
    assert (error.rank, error.exit_code, error.step, error.phase) == (1, -9, 2, "forward")
    assert "SIGKILL" in error.message


def test_rank_that_vanished_with_its_monitor_is_named_when_its_peer_stands_still(tmp_path: Path) -> None:
    end_by_themselves(launch(tmp_path, [wait_for_peers, killed_with_its_monitor]))
    record, error = record_of(tmp_path)
    assert (record.status, error.kind, error.rank) == ("timeout", "Stuck", 1)
    assert "rank 1 is gone before it finished (step 2, forward)" in error.message
    assert error.ranks[1].note == "the process had ended"


def test_rank_whose_node_has_a_folder_of_its_own_is_not_blamed(tmp_path: Path) -> None:
    """A run that hangs where only rank 0 can be seen."""
    end(launch(tmp_path / "a", [wait_for_peers, wait_for_peers], tmp_path / "b"))
    record, error = record_of(tmp_path / "a")
    assert (record.status, error.kind, error.rank) == ("timeout", "Stuck", None)
    assert "10 steps of 0.01 s and 1 s" in error.message
    assert "rank 1 may be at fault" in error.message
    assert "wait_forever" in error.ranks[0].stack
    assert "cannot be seen" in error.ranks[1].note


def test_run_that_its_launcher_ends_is_interrupted_and_blamed_on_no_rank(tmp_path: Path) -> None:
    processes = launch(tmp_path, [wait_for_peers, wait_for_peers], stuck_after_seconds=60)
    run = tmp_path / "run"
    until(lambda: all(rank_owner(run, rank).exists() for rank in range(2)))
    until(lambda: [steps_taken(rank_file(run, rank)) for rank in range(2)] == [2, 2])
    for process in processes:
        process.terminate()
    end(processes)
    _, error = record_of(tmp_path)
    assert (error.kind, error.rank) == ("Interrupted", None)


def launch_early(runs: Path, behaviours: list[Callable[[], None]]) -> list[Record]:
    """What torchrun does, whose ranks never tell a run's id; the records that are left."""

    def live(rank: int) -> None:
        def become(_tell: Callable[[str], None]) -> int:
            behaviours[rank]()
            return 1

        supervisor = supervise(rank, len(behaviours), runs, become)
        supervisor.early_record(lambda: a_request(len(behaviours)))
        supervisor.leave()

    end(started(len(behaviours), live))
    return [read_record(path) for path in runs.glob("*/record.json")]


def sleep_on() -> None:
    time.sleep(20)


def cannot_connect() -> None:
    raise ConnectionError("the server of the rendezvous cannot be reached")


def crashes() -> None:
    faulthandler.disable()  # else pytest's handler prints a crash that is not its own
    os.kill(os.getpid(), signal.SIGSEGV)


def out_of_memory() -> None:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("behaviour", "status", "kind", "said"),
    [
        (cannot_connect, "failed", "ConnectionError", "the server of the rendezvous cannot be reached"),
        (crashes, "failed", "Exit", "killed by SIGSEGV"),
        (out_of_memory, "oom", "RuntimeError", "out of memory"),
    ],
)
def test_a_rank_that_ends_early_leaves_a_record(
    tmp_path: Path, behaviour: Callable[[], None], status: str, kind: str, said: str
) -> None:
    (record,) = launch_early(tmp_path, [sleep_on, behaviour])
    assert (record.status, record.error.kind, record.error.rank) == (status, kind, 1)
    assert said in record.error.message


def test_ranks_that_end_together_leave_one_record(tmp_path: Path) -> None:
    assert len(launch_early(tmp_path, [cannot_connect] * 3)) == 1


def test_a_launch_that_is_cancelled_leaves_none(tmp_path: Path) -> None:
    def cancelled() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(20)

    assert launch_early(tmp_path, [cancelled]) == []


MONITORED = """
import os, signal, sys, time
from pathlib import Path
from harness.launch.external import supervise
folder = Path(sys.argv[1])
def main(tell):
    tell(folder.name)
    Path(folder, "pid").write_text(str(os.getpid()))
    {body}
supervise(3, 4, folder.parent, main).leave()
"""
TELLING = """
import threading, sys
from pathlib import Path
from harness.rank.process.start import SignalThread
SignalThread().on_termination(lambda: Path(sys.argv[1], "told").write_text("yes"))
Path(sys.argv[1], "pid").touch()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # the main thread never comes back
"""


def start(script: str, folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    until((folder / "pid").exists)
    return process


@pytest.mark.parametrize(
    ("body", "noted", "left"),
    [
        ("return 0", 0, 0),
        ("return 7", 7, 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 137),
        ("os.abort()", -6, 134),
        ("time.sleep(60)", -signal.SIGTERM, 128 + signal.SIGTERM),  # a request to end reaches the rank
    ],
)
def test_the_end_of_a_rank_is_noted(body: str, noted: int, left: int, tmp_path: Path) -> None:
    process = start(MONITORED.format(body=body), tmp_path)
    if noted == -signal.SIGTERM:
        process.terminate()
    assert process.wait(SECONDS) == left
    note = json.loads(rank_exit(tmp_path, 3).read_text())
    assert note["exit_code"] == noted
    assert note["max_resident_bytes"] > 0


def test_a_rank_does_not_outlive_its_monitor(tmp_path: Path) -> None:
    process = start(MONITORED.format(body="time.sleep(60)"), tmp_path)
    child = int(until((tmp_path / "pid").read_text))
    process.kill()
    process.wait(SECONDS)
    until(lambda: has_ended(child))


def test_a_stuck_rank_still_tells_before_it_ends(tmp_path: Path) -> None:
    process = start(TELLING, tmp_path)
    process.terminate()
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert (tmp_path / "told").read_text() == "yes"


HOLD = """
import sys, time
from pathlib import Path
from harness.launch.external import claimed
with claimed(Path(sys.argv[1]), "cell", print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_goes_with_its_owner_only(tmp_path: Path) -> None:
    lock = tmp_path / ".cell.lock"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "held\n"
    forget_dead_claims(tmp_path)
    assert lock.exists()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert lock.exists()
    forget_dead_claims(tmp_path)
    assert not lock.exists()
    with claimed(tmp_path, "cell", lambda: None):
        assert lock.exists()
    assert not lock.exists()
