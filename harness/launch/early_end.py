"""Records a rank of torchrun, accelerate launch or srun that ended before the ranks had agreed on a run."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.record import Record
from harness.run_directory.assemble import assemble
from harness.run_directory.events import FailureEvent
from harness.run_directory.out_of_memory import is_out_of_memory
from harness.run_directory.outcome import Outcome
from harness.run_directory.request import RunRequest, rank_file
from harness.safe_text import capped, described, encodable
from harness.store import write_record

MOST_MESSAGE_BYTES = 2048
"""Fits with its names into one write of a pipe, which is then whole."""
PHASE = "start"


class EarlyEnd(BaseModel):
    """What a rank says of its end to the process that watches it."""

    model_config = ConfigDict(frozen=True)

    kind: str
    message: str
    status: Literal["oom", "failed"]


@contextmanager
def telling_why(writer: int) -> Iterator[None]:
    """Write to a pipe which exception ends this process."""
    try:
        yield
    except Exception as error:
        end = EarlyEnd(
            kind=encodable(type(error).__name__),
            message=capped(described(error), MOST_MESSAGE_BYTES),
            status="oom" if is_out_of_memory(error) else "failed",
        )
        with suppress(OSError):
            os.write(writer, end.model_dump_json().encode())
        raise


def read_early_end(text: str) -> EarlyEnd | None:
    """What a rank wrote; None: nothing that can be read."""
    try:
        return EarlyEnd.model_validate_json(text)
    except ValidationError:
        return None


def record_early_end(
    runs: Path, request: RunRequest, rank: int, exit_code: int, end: EarlyEnd | None
) -> Record | None:
    """Write the record of such a run; None: another rank of this launcher has.

    Nothing but their launcher is common to the ranks, so the run is named after it.
    """
    request = request.model_copy(update={"run_id": _name_of_launch(request.run_id)})
    directory = runs / request.run_id
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return None
    request.write(directory)
    now = time.time()
    if end is not None:
        failure = FailureEvent(
            status=end.status, error_kind=end.kind, message=end.message, at=now, phase=PHASE
        )
        rank_file(directory, rank).write_text(failure.model_dump_json() + "\n")
    outcome = Outcome(exit_codes={rank: exit_code}, ended_at={rank: now})
    record = assemble(directory, request, outcome)
    write_record(directory, record)
    return record


def _name_of_launch(run_id: str) -> str:
    """A run id that all ranks under one launcher on one node agree on without talking."""
    launcher = psutil.Process(os.getppid())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    began = datetime.fromtimestamp(launcher.create_time(), UTC).strftime("%Y%m%d-%H%M%S")
    identity = f"{socket.gethostname()} {launcher.pid} {launcher.create_time()} {attempt}"
    what = run_id.split("-")[2:-1]
    return "-".join([began, *what, hashlib.sha256(identity.encode()).hexdigest()[:6]])
