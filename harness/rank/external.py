"""A run whose ranks were started by torchrun, accelerate launch or srun: agree on it, run, record."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from harness.backends.base import World
from harness.files import write_atomically
from harness.rank.process.environment import join_process_group, prepare_process, world_of
from harness.rank.rank import run_rank
from harness.record import Record
from harness.record.store import write_record
from harness.run_directory.assemble import assemble, external_outcome, node_file, wait_for_ends, write_node
from harness.run_directory.request import REQUEST_NAME, RunRequest, rank_file

PIECE_BYTES = 4 * 2**20
"""torch's store refuses values above 8 MiB."""
PATIENCE = timedelta(seconds=30)


def hand_over(store: Any, rank: int, files: Iterable[Path]) -> None:
    """Put these files of a rank into the store; `fetch` finds them once all of them are there."""
    contents = {path.name: path.read_text(encoding="utf-8") for path in files if path.exists()}
    packed = zlib.compress(json.dumps(contents).encode())
    pieces = [packed[start : start + PIECE_BYTES] for start in range(0, len(packed), PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(_key(rank, str(index)), piece)
    store.set(_key(rank, "pieces"), str(len(pieces)))


def fetch(store: Any, rank: int, directory: Path, patience: timedelta = PATIENCE) -> bool:
    """Write a rank's files into `directory`; False if it did not hand them over in time."""
    count = _key(rank, "pieces")
    try:
        store.wait([count], patience)
    except RuntimeError:  # torch's DistStoreError: the rank died before it could
        return False
    pieces = [store.get(_key(rank, str(index))) for index in range(int(store.get(count)))]
    contents: dict[str, str] = json.loads(zlib.decompress(b"".join(pieces)))
    for name, text in contents.items():
        write_atomically(directory / Path(name).name, text)
    return True


def _key(rank: int, part: str) -> str:
    return f"harness/files/{rank}/{part}"


SHARED_FOLDER_PATIENCE_SECONDS = 5.0
"""Network file systems show a new file late."""


def run_external(own: RunRequest, runs: Path, tell: Callable[[str], object]) -> tuple[Record | None, int]:
    """Run this process's rank of a run that rank 0 names; return (rank 0's record, exit code).

    own: what this rank would run; rank 0's counts. `tell` is given the run's id once its folder is there.
    Where nodes do not share the runs folder, each writes to its own, and rank 0 gathers what is needed.
    """
    world = world_of(own.device, own.ranks_per_node)
    prepare_process(own, world)
    join_process_group(world, own.limits.collective_seconds)
    agreed: list[Any] = [own.model_dump_json()]
    dist.broadcast_object_list(agreed, src=0)
    request = RunRequest.model_validate_json(agreed[0])
    run = _ExternalRun(directory=runs / request.run_id, request=request, world=world)
    run.agree_on_folder()
    tell(request.run_id)
    if world.rank == 0:
        signal.signal(signal.SIGTERM, run.end_early_and_leave)
    code = run_rank(run.directory, run.end_early)
    run.give()
    if world.rank != 0:
        return None, code
    return run.record(code), code


@dataclass
class _ExternalRun:
    """One rank's view of the run."""

    directory: Path
    request: RunRequest
    world: World
    without_runs_folder: tuple[int, ...] = ()
    """Ranks that do not see rank 0's folder."""

    def agree_on_folder(self) -> None:
        """Make the folder, and find out which ranks share it."""
        if self.world.rank == 0:
            self.directory.mkdir(parents=True)
            self.request.write(self.directory)
        dist.barrier()
        seen = self._sees_folder()
        everyone: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(everyone, seen)
        self.without_runs_folder = tuple(rank for rank, sees in enumerate(everyone) if not sees)
        first = self.world.local_rank == 0
        if not seen and first:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.request.write(self.directory)
        dist.barrier()
        if first:
            write_node(self.directory, self._node)

    def give(self) -> None:
        """Hand over this rank's files, if rank 0 cannot see them."""
        if self.world.rank in self.without_runs_folder:
            mine = [rank_file(self.directory, self.world.rank)]
            if self.world.local_rank == 0:
                mine.append(node_file(self.directory, self._node))
            hand_over(_get_default_store(), self.world.rank, mine)

    def record(self, code: int | None = None) -> Record:
        """Gather what is elsewhere, and write the record; `code` is this rank's if it has ended."""
        for rank in self.without_runs_folder:
            fetch(_get_default_store(), rank, self.directory)
        size = self.world.world_size
        # Also of a run that succeeded: other ranks may note a moment later that they are done.
        wait_for_ends(self.directory, size)
        outcome = external_outcome(self.directory, size)
        if code is not None and outcome.stopped is None:
            outcome = replace(outcome, exit_codes=outcome.exit_codes | {self.world.rank: code})
        record = assemble(self.directory, self.request, outcome)
        write_record(self.directory, record)
        return record

    def end_early(self) -> None:
        """When the launcher ends this rank because another failed, the record is still written."""
        self.give()
        if self.world.rank == 0:
            self.record()
            sys.stderr.flush()

    def end_early_and_leave(self, _signal: int, _frame: FrameType | None) -> None:
        """For the time before training, when nothing else listens to signals."""
        self.end_early()
        os._exit(1)

    @property
    def _node(self) -> int:
        return self.world.rank // self.world.ranks_per_node

    def _sees_folder(self) -> bool:
        deadline = time.monotonic() + SHARED_FOLDER_PATIENCE_SECONDS
        while not (self.directory / REQUEST_NAME).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True
