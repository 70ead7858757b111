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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
from pydantic import BaseModel, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import open_plain, read_plain, write_atomically
from harness.record import ErrorPart, Part, RankStatePart
from harness.run_directory.request import modules_file, numbered_file, rank_state
from harness.safe_text import MOST_LOG_TAIL_BYTES, capped_tail, redacted
from harness.snapshots.flight_recorder import KEPT, Hang, explain, read_dumps

HEAD_BYTES = 256
STEP_PHASES = ("data", "forward", "backward", "step")
"""Phases that every training step has; others have a time limit of their own."""
TURN = "turn"
"""Between the steps of two turns."""
EVALUATION = "evaluation"
"""Begins the phases of an evaluation, one per batch."""
COLLECTIVES_PREFIX = "collectives: "
HELPER_THREADS = ("in answer_signals", "in wait_and_leave", "in _tell_when_still", "in write_where")
"""In the stacks of threads that only wait for signals or for the launcher's end."""
MOST_STACK_BYTES = 16 * 2**10


@dataclass(frozen=True, kw_only=True)
class Position:
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
    position: Position | None = None
    stack: str = ""
    collective: str | None = None
    """The oldest collective that has not ended."""
    has_answered: bool = False
    """Whether the rank wrote its collectives, which comes last."""


class PositionWriter:
    """Notes where this rank is: about a microsecond, no growing file, and no error where it cannot write."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        self._step: int | None = None
        self._phase = "start"
        self._doing: str | None = None
        self._written = b""
        self._file: int | None = None
        try:
            self._file = os.open(rank_state(run_directory, rank), os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError:
            return
        self.enter("start")

    @property
    def position(self) -> Position:
        return Position(phase=self._phase, step=self._step, doing=self._doing)

    def begin_step(self, step: int | None) -> None:
        """What follows belongs to this training step; None: to none."""
        self._step = step

    def enter(self, phase: str) -> None:
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
        if "doing" in said:
            self._doing = said["doing"]
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        step = "-" if self._step is None else self._step
        head = f"{step} {self._phase}" + (f"\t{self._doing}" if self._doing else "")
        line = head.encode(errors="replace")[: HEAD_BYTES - 1].ljust(HEAD_BYTES - 1) + b"\n"
        if line == self._written:
            return
        self._written = line
        try:
            # Not into a mapping of the file: on a full disk that ends the process (SIGBUS).
            os.pwrite(self._file, line, 0)
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
        noted = read_plain(modules_file(run_directory, rank), MOST_DOCUMENT_BYTES)
        return noted.decode(errors="replace").splitlines()
    except OSError:
        return []


def read_head(run_directory: Path, rank: int) -> bytes:
    """The first line as it stands; empty where there is none. It changes whenever the rank moves on."""
    try:
        with open_plain(rank_state(run_directory, rank)) as file:
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
    """All that a rank wrote of itself; of its stacks those of its own helpers left out."""
    try:
        data = read_plain(rank_state(run_directory, rank), MOST_DOCUMENT_BYTES)[HEAD_BYTES:]
    except OSError:
        data = b""
    lines = data.decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(COLLECTIVES_PREFIX)]
    document: Any = {}
    with suppress(ValueError):
        document = json.loads(said[-1].removeprefix(COLLECTIVES_PREFIX)) if said else {}
    document = document if isinstance(document, dict) else {}
    blocks = "\n".join(line for line in lines if line not in said).split("\n\n")
    threads = [block.strip() for block in blocks if block.strip()]
    working = [block for block in threads if not any(helper in block for helper in HELPER_THREADS)]
    stack = "\n\n".join(working[-1:] + working[:-1])  # `faulthandler` writes the main thread last
    return RankState(
        position=read_position(run_directory, rank),
        stack=stack.encode()[:MOST_STACK_BYTES].decode(errors="ignore"),
        collective=document.get("pending"),
        has_answered=bool(said),
    )


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
        with open_plain(path) as file:
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

    def within_root(file: re.Match[str]) -> str:
        root = next((root for root in _import_roots() if file[0].startswith(root)), "")
        return file[0].removeprefix(root)

    return redacted(_FILE_OF_TRACEBACK.sub(within_root, text))


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


device_note = numbered_file("rank-{:05d}.device.json")
"""Where a rank's note is."""
STUCK_NAME = "stuck.json"
REMEDY = (
    "have every rank run it, on zero rows where it has none, or run ddp:find_unused_parameters=true; with "
    "model.block_class for the module that holds it, zero3:leaf_module=blocks or fsdp1"
)
"""Of ranks that run different modules: only some gather the weights, or have the gradients. A unit that every
rank runs has gradients of zeros under these (torch 2.13, DeepSpeed 0.19.8)."""
AS_OFTEN = (
    "have every rank call it as often, on zero rows where it has none, or run ddp, zero1 or zero2, which "
    "gather no weights in passes"
)
"""Of ranks that call one module different numbers of times."""
MOST_RANKS_SHOWN = 32
"""Ranks whose states a record keeps; those at fault first."""
ORDER = ("start", "rendezvous", "load data", "setup", "data", "forward", "backward", "step")

_MEETING = re.compile(r"[^\n]*\n\s*File \"[^\"\n]*torch/distributed/(?:distributed_c10d|rendezvous)\.py\"")
"""The innermost frame of a rank that waits for others at the store: no collective is recorded then."""


class StuckNote(Part):
    """What whoever watches the ranks noted when they had to be ended."""

    kind: Literal["Stuck", "Timeout"] = "Stuck"
    """Whether they stood still, or took too long."""
    reason: str
    """Why they were ended, without its end."""
    stopped_ranks: list[int] = []
    """Whose processes were stopped (SIGSTOP): they can say nothing."""
    gone_ranks: list[int] = []
    """Whose processes had ended unfinished before the others were asked: a network may tell no peer of it."""
    unseen_ranks: list[int] = []
    """Whose nodes have a runs folder of their own: where they were is not known."""

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / STUCK_NAME, self.model_dump_json())


@dataclass(frozen=True, kw_only=True)
class Late:
    """The ranks that the others wait for, and how that is known."""

    ranks: tuple[int, ...]
    why: str
    """Empty: by the order of collectives."""


def read_note(run_directory: Path) -> StuckNote | None:
    """What was noted; None: the ranks did not have to be ended."""
    return read_part(run_directory / STUCK_NAME, StuckNote)


STILL_SECONDS = 5.0
"""A rank of an observed script that has ended no step for so long writes where it stands."""


def still_note(run_directory: Path, world_size: int) -> StuckNote | None:
    """Note that every rank wrote by itself where it stands; None: one moved on."""
    if all(read_state(run_directory, rank).has_answered for rank in range(world_size)):
        return StuckNote(reason=f"no rank ended a step for {STILL_SECONDS:g} s")
    return None


def rank_states(run_directory: Path, world_size: int) -> list[RankStatePart]:
    """Where each rank was last, of runs that ended without being asked; the first 32 ranks."""
    shown = range(min(world_size, MOST_RANKS_SHOWN))
    return [_part(rank, read_state(run_directory, rank), None) for rank in shown]


def stuck_error(run_directory: Path, world_size: int, note: StuckNote) -> ErrorPart:
    """What a record says of ranks that had to be ended."""
    states = {rank: read_state(run_directory, rank) for rank in range(world_size)}
    seen = {rank: state for rank, state in states.items() if rank not in note.unseen_ranks}
    hang = hang_of(run_directory, seen)
    late = late_ranks(seen, note.stopped_ranks, note.gone_ranks, hang)
    parted = parting(run_directory, world_size)
    rank = late.ranks[0] if late is not None else None
    at_fault = states[rank].position if rank is not None else None
    order = sorted(states, key=lambda r: (late is None or r not in late.ranks, r))
    said = [*filter(None, [note.reason, parted]), *_sentences(late, seen, note.unseen_ranks, hang)]
    return ErrorPart(
        kind=note.kind,
        message="; ".join(said),
        rank=rank,
        **ErrorPart.shared(at_fault),
        ranks=[_part(r, states[r], note) for r in sorted(order[:MOST_RANKS_SHOWN])],
    )


def hang_of(run_directory: Path, ranks: Collection[int]) -> Hang | None:
    """What the ranks' flight recorders say together; None where one is missing: nothing was begun then."""
    with suppress(HarnessError):
        dumps = read_dumps(sorted(run_directory.glob(KEPT)))
        return explain(dumps) if {dump.rank for dump in dumps} == {*ranks} else None
    return None


def parting(run_directory: Path, world_size: int) -> str | None:
    """Where the modules that ranks run in one of the first steps part, and what to do; None: nowhere."""
    noted = {rank: read_modules(run_directory, rank) for rank in range(world_size)}
    runs = {rank: names for rank, names in noted.items() if names}
    steps = enumerate(zip(*runs.values(), strict=False))
    place, names = next(((n, names) for n, names in steps if len(set(names)) > 1), (0, ()))
    if not names:
        return None
    if often := _more_often(next(iter(runs.values()))[:place], dict(zip(runs, names, strict=True))):
        return f"{often}; {AS_OFTEN}"
    for name in dict.fromkeys(names):
        if idle := [rank for rank, of_rank in runs.items() if name not in of_rank]:
            at_work = [rank for rank, of_rank in runs.items() if name in of_rank]
            where = f"module '{name}' runs on rank {_named(at_work)} and not on rank {_named(idle)}"
            break
    else:
        (first, one), (second, other) = list(dict(zip(names, runs, strict=True)).items())[:2]
        where = f"rank {one} runs module '{first}' where rank {other} runs '{second}'"
    return f"{where}; {REMEDY}"


def _more_often(before: Sequence[str], runs: Mapping[int, str]) -> str | None:
    """Where some ranks call a module again that all have called, and others go on to one that is new.

    before: what all have run; of a later micro-step only what that one has.
    """
    following = set(runs.values())
    if following <= set(before):
        last = len(before) - 1 - list(reversed(before)).index(before[0])
        before = before[last:]
    called = [name for name in following if name in before]
    if len(called) != 1 or len(following) < 2:
        return None
    (name,), times = called, before.count(called[0])
    more, fewer = ([rank for rank, of in runs.items() if (of == name) is again] for again in (True, False))
    on = f"{times} time{'s' if times > 1 else ''} on rank {_named(fewer)}, which runs '{runs[fewer[0]]}' then"
    return f"module '{name}' runs {times + 1} times on rank {_named(more)} and {on}"


def late_ranks(
    states: Mapping[int, RankState],
    stopped: Sequence[int],
    gone: Sequence[int] = (),
    hang: Hang | None = None,
) -> Late | None:
    """The ranks that did not arrive where the others wait; None: that cannot be told.

    In this order: processes that have ended, processes that are stopped, ranks in a factory of the job and in
    no collective while others are elsewhere, ranks in no collective while others wait in one, ranks outside
    of torch.distributed while others wait in it, those that `hang` names, and ranks in an earlier step or
    phase.
    """
    if gone:
        return Late(ranks=tuple(gone), why="gone before it finished")
    if stopped:
        return Late(ranks=tuple(stopped), why="stopped by SIGSTOP")
    waiting = [rank for rank, state in states.items() if state.collective is not None]
    within = tuple(rank for rank, state in states.items() if _doing(state) and rank not in waiting)
    if within and len(within) < len(states):
        return Late(ranks=within, why="in code of the job's own, which has not returned")
    others = tuple(rank for rank in states if rank not in waiting)
    if waiting and others:
        return Late(ranks=others, why="in no collective, while others wait in one")
    meeting = [rank for rank, state in states.items() if _MEETING.match(state.stack)]
    if not waiting and meeting and len(meeting) < len(states):
        absent = tuple(rank for rank in states if rank not in meeting)
        return Late(ranks=absent, why="elsewhere, while others wait to form a process group")
    if waiting and hang is not None:
        return Late(ranks=hang.culprits, why="") if hang.culprits else None
    places = {
        rank: (-1 if at.step is None else at.step, ORDER.index(at.phase))
        for rank, state in states.items()
        if (at := state.position) is not None and at.phase in ORDER
    }
    if len(set(places.values())) <= 1:
        return None
    first = min(places.values())
    return Late(ranks=tuple(rank for rank, at in places.items() if at == first), why="behind the others")


def _doing(state: RankState) -> str | None:
    return state.position.doing if state.position is not None else None


def _sentences(
    late: Late | None, states: Mapping[int, RankState], unseen: Sequence[int], hang: Hang | None
) -> list[str]:
    waits = [(rank, state.collective) for rank, state in states.items() if state.collective is not None]
    if late is None and unseen:
        said = [f"rank {_named(unseen)} may be at fault: on other nodes, whose runs folder cannot be seen"]
    elif late is None and len({collective for _, collective in waits}) > 1:
        return [hang.verdict if hang else "the ranks wait in different collectives"]
    elif late is None and len(waits) == len(states):
        said = ["all ranks wait in the same collective: a broken network, or an overloaded machine"]
    elif late is None and (within := [state for state in states.values() if _doing(state)]):
        said = [f"code of the job's own has not returned ({_where(within[0])})"]
    elif late is None:
        said = ["no rank is behind the others"]
    elif hang is not None and not late.why:
        return [hang.verdict]
    else:
        verb = "is" if len(late.ranks) == 1 else "are"
        said = [f"rank {_named(late.ranks)} {verb} {late.why} ({_where(states[late.ranks[0]])})"]
    said += [f"rank {rank} waits in {collective}" for rank, collective in waits[:2]]
    return said


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _where(state: RankState) -> str:
    if state.position is None:
        return "not yet started"
    step = f"step {state.position.step}, " if state.position.step is not None else ""
    doing = f", in {state.position.doing}" if state.position.doing else ""
    return f"{step}{state.position.phase}{doing}"


def _part(rank: int, state: RankState, note: StuckNote | None) -> RankStatePart:
    said = ""
    if note is None:
        pass
    elif rank in note.stopped_ranks:
        said = "the process was stopped (SIGSTOP), so it could not write its stacks"
    elif rank in note.gone_ranks:
        said = "the process had ended"
    elif rank in note.unseen_ranks:
        said = "its node has a runs folder of its own, which cannot be seen"
    elif not state.stack:
        said = "the process did not write its stacks when asked"
    shared = RankStatePart.shared(state.position)
    stack = shown_text(state.stack)
    return RankStatePart(rank=rank, **shared, collective=state.collective, stack=stack, note=said)
