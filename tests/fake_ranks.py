"""Ranks without torch: small processes that write what a rank writes and then behave as a test wants."""

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.job.experiment import Limits, MeasureSection
from harness.job.job import Job, TrainingSection
from harness.launch.launcher import LocalLauncher, whole
from harness.rank.process.start import SignalThread, dump_stacks_when_asked
from harness.record import ErrorPart, Record
from harness.run_directory.assemble import assemble
from harness.run_directory.events import DoneEvent, EventWriter, FailureEvent, StepEvent, StoppedEvent
from harness.run_directory.rank_state import PositionWriter
from harness.run_directory.request import RunRequest, rank_file, rank_log, rank_state

STEP = {
    "window": "timed", "loss_sum": 80.0, "gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 8,
    "target_tokens": 8, "global_target_tokens": 16, "samples": 1, "sample_hashes": "0" * 16,
    "data_seconds": 0.0, "phase_seconds": {"forward": 0.1, "backward": 0.1, "step": 0.1},
}  # fmt: skip
CONNECTION_RESET = "[tcp/pair.cc:547] Read error [127.0.0.1]:1234: Connection reset by peer"


class Rank:
    """What a test's rank does next."""

    def __init__(self, folder: Path, rank: int, turns: Any = None, peers: Sequence[int] = ()) -> None:
        self.turns = turns
        self._peers = peers
        self.folder = folder
        dump_stacks_when_asked(rank_state(folder, rank))
        signals = SignalThread()
        self.log = rank_log(folder, rank)
        self.events = EventWriter(rank_file(folder, rank))
        self.position = PositionWriter(folder, rank)
        signals.on_state_asked(folder, rank)
        signals.on_termination(lambda: self.events.write(StoppedEvent(at=time.time())))

    def train(self, steps: int = 2, first: int = 0) -> None:
        """Take steps of a hundredth of a second and begin the next."""
        for step in range(first, steps):
            self.position.begin_step(step)
            self.position.enter("forward")
            time.sleep(0.01)
            self.events.write(StepEvent(step=step, seconds=0.01, **STEP))
        self.position.begin_step(steps)
        self.position.enter("forward")

    def fail(self, message: str = CONNECTION_RESET, kind: str = "RuntimeError", **values: Any) -> None:
        """What the harness writes of an exception."""
        values = {"status": "failed", "step": 2, "phase": "backward"} | values
        self.events.write(FailureEvent(error_kind=kind, message=message, at=time.time(), **values))
        os._exit(1)

    def done(self) -> None:
        self.events.write(DoneEvent())
        os._exit(0)

    def miss_a_peer(self, seconds: float = 0.3) -> None:
        """Wait in a collective until the connection to the peer breaks."""
        self.outlive_a_peer(seconds)
        self.fail()

    def outlive_a_peer(self, seconds: float) -> None:
        """Wait in a collective, and so long after a peer has ended."""
        self.position.enter("backward")
        if self._peers:
            select.select(self._peers, [], [])
        time.sleep(seconds)

    def wait_forever(self) -> None:
        """As in a collective: the main thread does not come back."""
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


Behaviour = Callable[[Rank], None]


class FakeLauncher(LocalLauncher):
    """The launcher with ranks that behave as given."""

    def __init__(self, behaviours: Mapping[int, Behaviour]) -> None:
        self.device = "cpu"
        self.behaviours = behaviours
        self._lives: list[int] = []
        """Of each rank the end of a pipe that can be read once the rank has ended."""
        self._held: dict[int, int] = {}
        """The other ends, until their ranks have them alone."""

    def _start(self, run_directory: Path, request: RunRequest, rank: int, store: Any, turns: Any) -> Any:
        def live() -> None:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for other in self._held.keys() - {rank}:
                os.close(self._held[other])
            peers = [pipe for other, pipe in enumerate(self._lives) if other != rank]
            self.behaviours[rank](Rank(run_directory, rank, turns, peers))
            os._exit(0)

        if rank == 0:
            pipes = [os.pipe() for _ in range(request.world_size)]
            self._lives = [reader for reader, _ in pipes]
            self._held = {other: writer for other, (_, writer) in enumerate(pipes)}
        process = multiprocessing.get_context("fork").Process(target=live)
        process.start()
        os.close(self._held.pop(rank))
        return process


def a_request(world_size: int = 2, **limits: float | None) -> RunRequest:
    return RunRequest(
        run_id="run", created_at="2026-01-02T03:04:05.678+00:00", command=["harness"], backend="ddp",
        job=Job(training=TrainingSection(steps=4, global_batch_size=8)), job_id="0123456789ab", key="c",
        repeat=0, measure=MeasureSection(), preset="like-for-like", device="cpu", world_size=world_size,
        ranks_per_node=world_size, threads_per_rank=1, micro_batch_size=4, accumulation_steps=1,
        limits=Limits(**limits),
    )  # fmt: skip


def wait_for_peers(rank: Rank) -> None:
    rank.train()
    rank.position.enter("backward")
    rank.wait_forever()


def record_of(folder: Path, *behaviours: Behaviour, **limits: float | None) -> Record:
    """Of a run whose ranks behave so."""
    request = a_request(len(behaviours), **limits)
    running = FakeLauncher(dict(enumerate(behaviours))).running(folder, request, lambda _: None)
    return assemble(folder, request, whole(running))


def failure_of(folder: Path, *behaviours: Behaviour, **limits: float | None) -> tuple[Record, ErrorPart]:
    record = record_of(folder, *behaviours, **limits)
    assert record.error is not None
    return record, record.error


def has_ended(process: int) -> bool:
    """Whether it is gone, or dead and reaped by nobody, as orphans in a container."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
