"""A run whose ranks were started by torchrun, accelerate launch or srun: agree on it, run, record."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.launch.assemble import assemble
from harness.launch.local import Outcome
from harness.record import Record
from harness.request import RunRequest
from harness.store import write_record
from harness.worker.environment import join_process_group, prepare_process, world_of
from harness.worker.rank import COLLECTIVE_TIMEOUT_SECONDS, run_rank


def run_external(make_request: Callable[[], RunRequest], runs: Path) -> tuple[Record | None, int]:
    """Run this process's rank of a run that rank 0 names; return (rank 0's record, exit code).

    `make_request` is called on every rank; rank 0's answer counts. The runs folder must be shared.
    """
    own = make_request()
    world = world_of(own)
    prepare_process(own, world)
    join_process_group(world, COLLECTIVE_TIMEOUT_SECONDS)
    agreed: list[Any] = [own.model_dump_json()]
    dist.broadcast_object_list(agreed, src=0)
    request = RunRequest.model_validate_json(agreed[0])
    directory = runs / request.run_id
    if world.rank == 0:
        directory.mkdir(parents=True)
        request.write(directory)
    dist.barrier()
    record_at_end = _recorder(directory, request) if world.rank == 0 else None
    if record_at_end is not None:
        signal.signal(signal.SIGTERM, lambda _signal, _frame: (record_at_end(), os._exit(1)))
    code = run_rank(directory, record_at_end)
    if world.rank != 0:
        return None, code
    record = assemble(directory, request, Outcome(exit_codes={world.rank: code}))
    write_record(directory, record)
    return record, code


def _recorder(directory: Path, request: RunRequest) -> Callable[[], None]:
    """When torchrun ends this rank because another failed, the record is still written."""

    def write() -> None:
        outcome = Outcome(exit_codes={}, stopped="interrupted")
        write_record(directory, assemble(directory, request, outcome))
        sys.stderr.flush()

    return write
