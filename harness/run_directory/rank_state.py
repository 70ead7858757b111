"""Where a rank is: one small file per rank, rewritten in place, that outlives the rank however it ends.

The first line holds step and phase, and which function of the job's own runs. When the rank is asked for
more, its stacks follow, and a line about the collective that it waits in.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.files import read_plain
from harness.record import Part
from harness.run_directory.request import modules_file, rank_state
from harness.safe_text import MOST_LOG_TAIL_BYTES, capped_tail, redacted

HEAD_BYTES = 256
STEP_PHASES = ("data", "forward", "backward", "step")
"""Phases that every training step has; others have a time limit of their own."""
TURN = "turn"
"""Between the steps of two turns."""
EVALUATION = "evaluation"
"""Begins the phases of an evaluation, one per batch."""
COLLECTIVES_PREFIX = "collectives: "
HELPER_THREADS = ("process/signals.py", "in wait_and_leave")
"""In the stacks of threads that only wait for signals or for the launcher's end."""
MOST_STACK_BYTES = 16 * 2**10


@dataclass(frozen=True, kw_only=True)
class Position:
    """What a rank is doing."""

    phase: str
    step: int | None
    doing: str | None = None
    """Code of the job's own that runs, such as "model.factory 'm.py:build'"."""

    @property
    def in_step(self) -> bool:
        return self.phase in STEP_PHASES

    @property
    def is_as_long_as_a_step(self) -> bool:
        """Whether it lasts no longer than a training step: part of one, or one batch of an evaluation."""
        return self.in_step or self.phase == TURN or self.phase.startswith(EVALUATION)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What the file of a rank says."""

    position: Position | None = None
    stack: str = ""
    collective: str | None = None
    """The oldest collective that has not ended."""
    enqueued: Mapping[str, int] = field(default_factory=dict)
    """By process group, how many collectives the rank has begun."""
    has_answered: bool = False
    """Whether the rank wrote its collectives, which comes last."""


class PositionWriter:
    """Notes where this rank is: about a microsecond, no growing file, and no error where it cannot write."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        self._step: int | None = None
        self._phase = "start"
        self._doing: str | None = None
        self._file: int | None = None
        try:
            self._file = os.open(rank_state(run_directory, rank), os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError:
            return
        self.enter("start")

    @property
    def position(self) -> Position:
        """Where this rank is."""
        return Position(phase=self._phase, step=self._step, doing=self._doing)

    def begin_step(self, step: int | None) -> None:
        """What follows belongs to this training step; None: to none."""
        self._step = step

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._phase = phase
        self._write()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase in the midst of another."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def hear(self, said: Mapping[str, Any]) -> None:
        """What `harness.rank.telling` says."""
        if "doing" in said:
            self._doing = said["doing"]
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        step = "-" if self._step is None else self._step
        head = f"{step} {self._phase}" + (f"\t{self._doing}" if self._doing else "")
        line = head.encode(errors="replace")[: HEAD_BYTES - 1].ljust(HEAD_BYTES - 1)
        try:
            os.pwrite(self._file, line + b"\n", 0)
        except OSError:  # a full disk ends no run: it only loses its positions
            self._file = None


class ModuleWriter:
    """Notes which modules a step has begun so far, in their order: where ranks part, one of them idles.

    For the first steps only: a write of about a microsecond for each run of a module.
    """

    def __init__(self, run_directory: Path | None, rank: int) -> None:
        """run_directory: None notes nothing."""
        self._path = None if run_directory is None else modules_file(run_directory, rank)
        self._file: int | None = None

    def begin_step(self) -> None:
        """Begin anew."""
        self.end()
        if self._path is None:
            return
        with suppress(OSError):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def note(self, name: str) -> None:
        """A module begins."""
        if self._file is not None:
            try:
                os.write(self._file, f"{name}\n".encode(errors="replace"))
            except OSError:  # as of positions
                self._file = None

    def end(self) -> None:
        """The step is over; nothing of it remains."""
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._file = None
            with suppress(OSError):
                self._path.unlink()


def read_modules(run_directory: Path, rank: int) -> list[str]:
    """Names of the modules that the rank's step began, in their order; empty where it did not note them."""
    try:
        return modules_file(run_directory, rank).read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_head(run_directory: Path, rank: int) -> bytes:
    """The first line as it stands; empty where there is none. It changes whenever the rank moves on."""
    try:
        with rank_state(run_directory, rank).open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def read_position(run_directory: Path, rank: int) -> Position | None:
    """Where a rank is, or was when it ended; None: it never said."""
    head, _, doing = read_head(run_directory, rank).decode(errors="replace").strip().partition("\t")
    step, _, phase = head.partition(" ")
    if not phase.strip():
        return None
    number = int(step) if step.isdecimal() else None
    return Position(phase=phase.strip(), step=number, doing=doing or None)


def read_state(run_directory: Path, rank: int) -> RankState:
    """All that a rank wrote of itself."""
    try:
        data = rank_state(run_directory, rank).read_bytes()[HEAD_BYTES:]
    except OSError:
        data = b""
    lines = data.decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith(COLLECTIVES_PREFIX)), None)
    document = _document(said)
    stack = _main_thread_first("\n".join(n for n in lines if not n.startswith(COLLECTIVES_PREFIX)))
    return RankState(
        position=read_position(run_directory, rank),
        stack=stack.encode()[:MOST_STACK_BYTES].decode(errors="ignore"),
        collective=document.get("pending"),
        enqueued=document.get("enqueued", {}),
        has_answered=said is not None,
    )


def _main_thread_first(stacks: str) -> str:
    """What `faulthandler` wrote, without the rank's own helpers: the main thread, which comes last, first."""
    threads = [block.strip() for block in stacks.split("\n\n") if block.strip()]
    working = [block for block in threads if not any(helper in block for helper in HELPER_THREADS)]
    return "\n\n".join(working[-1:] + working[:-1])


def _document(line: str | None) -> dict[str, Any]:
    if line is None:
        return {}
    try:
        document = json.loads(line.removeprefix(COLLECTIVES_PREFIX))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


Model = TypeVar("Model", bound=BaseModel)
LOG_TAIL_LINES = 40
MOST_LOG_BYTES = 2**20
"""Of a log, its end."""
_FILE_OF_TRACEBACK = re.compile(r'(?<=\bFile ")[^"\n]+(?=", line \d)')


def read_part(path: Path, kind: type[Model]) -> Model | None:
    """What a file holds; None: it is not there, or cannot be read, or is something else."""
    try:
        return kind.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except (OSError, ValidationError):
        return None


def read_log(path: Path) -> str:
    """The end of a log, which may be as long as a disk; empty where there is none that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            return file.read(MOST_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def log_tail(log: Path) -> str:
    """The last lines of a log; empty where there is none that can be read.

    Files in a traceback are named from where Python finds them, 'torch/nn/functional.py': a record is read
    and published where nobody knows the folders of the machine that wrote it.
    """
    tail = "\n".join(read_log(log).splitlines()[-LOG_TAIL_LINES:])
    return capped_tail(shown_text(tail), MOST_LOG_TAIL_BYTES)


def shown_text(text: str) -> str:
    """Text of a rank as a record keeps it: no secrets, and no folders of the machine."""
    return redacted(_FILE_OF_TRACEBACK.sub(lambda file: _within_root(file[0]), text))


def _within_root(file: str) -> str:
    root = next((root for root in _import_roots() if file.startswith(root)), "")
    return file[len(root) :]


@lru_cache
def _import_roots() -> list[str]:
    """Folders that Python imports from, each with its slash, the innermost first."""
    checkout = str(Path(__file__).parents[2])
    folders = {checkout, *(entry for entry in sys.path if entry and Path(entry).is_dir())}
    return sorted((f"{folder.rstrip('/')}/" for folder in folders), key=len, reverse=True)


class Owner(Part):
    """A process on a machine."""

    host: str
    process: int
    started: float
    """When the process began: its number may be given again."""

    @classmethod
    def myself(cls) -> Owner:
        return cls(host=socket.gethostname(), process=os.getpid(), started=psutil.Process().create_time())

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False on other machines, where that cannot be seen."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.process)
            is_another = abs(process.create_time() - self.started) > 1
            return is_another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


WATCH = "HARNESS_WATCH_DEVICE"
"""Variable of ranks that note this; any value."""


class DeviceNote(Part):
    """One rank's."""

    rank: int
    index: int
    """Of the device among those that the rank sees."""
    uuid: str
    name: str
    event_step_seconds: list[float]
    """Of each step, between CUDA events recorded where the loop starts and stops its clock."""
    synchronisations: list[int]
    """Of each step, how often the device was synchronised within forward and backward passes."""
    micro_steps: int
    """Forward passes of each step."""
    gradient_bytes: int
    """Of the gradients whose norm was taken."""
    norm_peak_bytes: int
    """The most that the allocator served while it was taken, beyond those gradients."""


def device_note(run_directory: Path, rank: int) -> Path:
    """Where a rank's note is."""
    return run_directory / f"rank-{rank:05d}.device.json"
