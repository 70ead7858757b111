"""What a rank writes and a launcher reads: one JSON object per line. Floats that are not finite are null.

Also what a process that answers a question says meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from harness import record
from harness.backends.base import Effective
from harness.backends.mesh import Mesh
from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.files import open_plain
from harness.forms.layout import Layout
from harness.forms.terms import OwnForms
from harness.record.measured import EndedRank, ProbedRank, ReadyRank
from harness.record.run import DIGEST_KIND, with_details
from harness.run_directory.request import rank_file
from harness.safe_text import described, redacted, said

Sketches = Mapping[str, Sequence[float | None]]
"""Of each parameter: see `rank/probes/weights.py`."""


Duration = Annotated[float, AfterValidator(lambda seconds: round(seconds, 9))]
"""Seconds to the nanosecond, as far as the clock goes: more digits would be those of a binary fraction."""


class UnsupportedEvent(record.Part):
    """The backend cannot run here."""

    kind: Literal["unsupported"] = "unsupported"
    reasons: list[str]


class FailureEvent(record.Part):
    """An exception ended the rank."""

    kind: Literal["failure"] = "failure"
    status: Literal["oom", "failed"]
    error_kind: str
    message: str
    at: float
    """Seconds since the epoch."""
    step: int | None = None
    phase: str | None = None


class Held(record.Part):
    """One rank's range of one parameter."""

    shape: tuple[int, ...]
    start: int
    elements: int
    content: int
    """See `rank.probes.weights.content_sum`; those of ranges that do not overlap add up."""


Share = Mapping[str, Held]
Ranges = Mapping[tuple[int, int], Sequence[int]]
"""Of one parameter: the ranks that hold the same elements, by start and number."""


class SetupEvent(ReadyRank):
    """The rank is ready to train."""

    kind: Literal["setup"] = "setup"
    effective: Annotated[Effective, BeforeValidator(with_details)]
    native_config: dict[str, Any]
    versions: dict[str, str]
    initial_weights: record.WeightsPart | None
    share: dict[str, Held] = {}
    """Of an observed script: what this rank held of the weights before the first step."""
    collectives: str
    claim: StrategyKind | None = None
    own_forms: OwnForms | None = None
    """Of rank 0 only."""
    accelerator: record.AcceleratorPart | None = None
    layout: Layout | None = None
    """None: the backend did not build the model."""
    model: record.ModelPart | None = None
    split: record.SplitPart | None = None
    update_of_part: float | None = None
    data: record.DataPart | None
    """None: not known of an observed script."""
    steps: int | None
    """Of the whole training; None: not known of an observed script."""


class AppliedGradients(record.Part):
    """Gradients that the optimizer was given on this rank, after clipping."""

    squares: float | None
    """Sum over all of their elements; None: not finite."""
    share: float
    """Elements over those of all parameters that train."""


class StepEvent(record.Part):
    """One optimizer step: see `StepPart` and `RankPart` for what they share."""

    kind: Literal["step"] = "step"
    step: int
    window: record.Window
    loss_sum: float | None
    gradient_norm: float | None
    norm_is_partial: bool = False
    """Whether the norm is that of this rank's part of the gradient."""
    learning_rate: float
    applied_learning_rate: float | None = None
    group_learning_rates: list[float | None] | None = None
    """Of an observed script: of each group of its optimizers, None where it has none or did not step."""
    applied: AppliedGradients | None = None
    global_target_tokens: int | None
    """None: an observed script, whose `loss_weight` counts."""
    loss_weight: float | None = None
    """What the loss sums of all ranks are divided by, added up over them: this rank's part."""
    samples: int | None
    tokens: int | None
    target_tokens: int | None
    sample_hashes: str | None
    seconds: Duration
    data_seconds: Duration
    phase_seconds: dict[str, Duration]
    batch_digests: list[str] | None = None
    """None: not one of the first steps."""
    batch_hash_sum: str | None = None
    computed_loss_sum: float | None = None
    loss_gradients: list[float] | None = None
    loss_factors: list[float] | None = None
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    without_gradient: list[str] | None = None
    """Trained parameters that this rank gave none; None: as in the step before."""
    gradients_unknown: bool = False
    """Whether that is known no longer."""
    passes: tuple[int, int] | None = None
    """Calls of the model and backward passes of the loss; None: not known."""
    figures: dict[str, float | None] = {}
    """See `step_figures` of `RankPart`."""
    weight_bits: dict[str, int] = {}
    """Of each tensor that trains, as the step begins, the sum of its bits as whole numbers; {}: not looked
    at."""


class ObservationEvent(record.Part):
    """What was seen of a training script; the last one counts."""

    kind: Literal["observation"] = "observation"
    observation: record.ObservationPart
    seen: dict[str, Any]
    """Settings of a job by their names, such as 'training.precision', as far as they were seen."""
    world_size: int
    ranks_per_node: int
    device: str
    threads: int
    micro_batch_size: int | None
    accumulation_steps: int
    options: dict[str, Any] = {}
    """Of the built-in backend that runs the same strategy, as the script gave them to a library."""


class TurnEvent(record.Part):
    """A turn begins; also what a launcher sends to the ranks that wait for it."""

    kind: Literal["turn"] = "turn"
    steps: int
    """Timed steps of the turn."""
    place: int
    """Among all turns of these cells."""
    beside: list[str]
    """Run ids of the cells whose ranks wait meanwhile."""
    waited_seconds: Duration = 0.0
    """How long the rank waited for it."""
    waited_process_seconds: Duration = 0.0
    """Processor time that the rank took meanwhile, all threads together."""


class EvaluationEvent(record.Part):
    """One evaluation."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    loss_sum: float | None
    target_tokens: int
    samples: int
    """Over all ranks."""
    seconds: float


class CheckpointEvent(record.Part):
    """A checkpoint was saved or loaded."""

    kind: Literal["checkpoint"] = "checkpoint"
    part: record.CheckpointPart


class ExaminedEvent(record.Part):
    """Gradients and updates of one step by parameter, as sketches; for a diagnosis."""

    kind: Literal["examined"] = "examined"
    step: int
    gradients: Sketches | None
    """None: the engine cannot gather them."""
    updates: Sketches
    weight_norms: Mapping[str, float | None]


class MeasuredEvent(ProbedRank):
    """Everything that was probed."""

    kind: Literal["measured"] = "measured"
    communication: list[record.CommunicationPart]


class RankAnswers(record.Part):
    """Answers of one rank to its share of the held-out questions."""

    given: list[record.AnswerPart]
    seconds: float


class FinalEvent(EndedRank):
    """The state after the training."""

    kind: Literal["final"] = "final"
    weights: record.WeightsPart | None
    observed: record.ObservedPart
    loss_scale: float | None = None
    """After the training; None: no scaler, or the backend does not say."""
    answers: RankAnswers | None = None
    in_force: dict[str, Any] = {}
    """Fields of `Effective` that no training changes, as read back after it."""
    moment_sums: dict[str, tuple[float, float]] | None = None
    """By parameter, of this rank: sums of the squared first and of the second moments of Adam."""


class StoppedEvent(record.Part):
    """The rank was asked to terminate."""

    kind: Literal["stopped"] = "stopped"
    at: float


class DoneEvent(record.Part):
    """The rank finished."""

    kind: Literal["done"] = "done"


Event = (
    UnsupportedEvent
    | FailureEvent
    | SetupEvent
    | StepEvent
    | TurnEvent
    | ObservationEvent
    | EvaluationEvent
    | CheckpointEvent
    | ExaminedEvent
    | MeasuredEvent
    | FinalEvent
    | StoppedEvent
    | DoneEvent
)
ENDINGS = (DoneEvent, FailureEvent, UnsupportedEvent, StoppedEvent)
"""What a rank says last."""

_READER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def read_event(line: bytes) -> Event:
    """Raises ValidationError."""
    return _READER.validate_json(line)


class EventWriter:
    """Appends events to the rank's file; each line is complete before the next begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        line = _line(event)
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


class GuestEventWriter:
    """Appends events in a process of a script, which may close any descriptor and use its number again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Append one event, without secrets: those of a script's configuration are not known before."""
        line = _line(event)
        data = (line if event.kind == "step" else redacted(line)).encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


def _line(event: Event) -> str:
    try:
        return event.model_dump_json() + "\n"
    except PydanticSerializationError as error:
        what = f"what a rank reports ('{event.kind}') has no JSON form"
        raise HarnessError(f"{what}: {described(error)}") from error


_send: Callable[[Any], None] | None = None


def tell_through(send: Callable[[Any], None]) -> None:
    """Have what is told reach the launcher."""
    global _send
    _send = send


def tell(text: str) -> None:
    """A line for the person who waits; a rank, whose launcher asked nothing, keeps it."""
    if _send is not None:
        _send({"note": text})


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name code of the user's own while it runs: it may end the process, or never return."""
    if _send is not None:
        _send({"doing": what})
    yield
    if _send is not None:
        _send({"doing": None})


class Tail:
    """Remembers how far it has read."""

    broken_lines = 0
    """Lines read so far that are no event: a node that lost its power leaves such."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Events whose lines were completed since the last call."""
        try:
            with open_plain(self._path) as file:
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        lines = data[:end].split(b"\n")[:-1]
        events = []
        for line in lines:
            try:
                events.append(read_event(line))
            except ValidationError:
                self.broken_lines += 1
        return events


LAST_BYTES = 2**16
"""Of the file of a rank: more than its last line has."""
OfStep = TypeVar("OfStep", StepEvent, EvaluationEvent)
Value = TypeVar("Value")


@dataclass
class RankEvents:
    """What one rank wrote; of events that come once, the first. Of observations and measurements the last."""

    setup: SetupEvent | None = None
    steps: list[StepEvent] = field(default_factory=list)
    turns: list[TurnEvent] = field(default_factory=list)
    evaluations: list[EvaluationEvent] = field(default_factory=list)
    checkpoints: list[CheckpointEvent] = field(default_factory=list)
    measured: MeasuredEvent | None = None
    observation: ObservationEvent | None = None
    final: FinalEvent | None = None
    failures: list[FailureEvent] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why the backend cannot run."""
    stopped: StoppedEvent | None = None
    done: bool = False
    broken_lines: int = 0
    """That could not be read."""

    @property
    def has_ended(self) -> bool:
        return self.done or bool(self.failures or self.reasons) or self.stopped is not None

    def add(self, event: Event) -> None:
        match event:
            case UnsupportedEvent():
                self.reasons += event.reasons
            case DoneEvent():
                self.done = True
            case StepEvent() | TurnEvent() | EvaluationEvent() | CheckpointEvent() | FailureEvent():
                getattr(self, f"{event.kind}s").append(event)
            case SetupEvent() | FinalEvent() | StoppedEvent():
                setattr(self, event.kind, getattr(self, event.kind) or event)
            case MeasuredEvent() | ObservationEvent():
                setattr(self, event.kind, event)


def has_ended_well(run_directory: Path, rank: int) -> bool:
    """Whether the last line of a rank says that it is done, or that its backend cannot run here."""
    return isinstance(_last_event(run_directory, rank), DoneEvent | UnsupportedEvent)


def has_said_its_end(run_directory: Path, rank: int) -> bool:
    return isinstance(_last_event(run_directory, rank), ENDINGS)


def _last_event(run_directory: Path, rank: int) -> Event | None:
    """What the last line of a rank says; None: there is none, or it is broken."""
    try:
        with open_plain(rank_file(run_directory, rank)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        return read_event(last)
    except (OSError, ValidationError):
        return None


def read_events(run_directory: Path, world_size: int) -> dict[int, RankEvents]:
    events = {rank: RankEvents() for rank in range(world_size)}
    for rank, of_rank in events.items():
        tail = Tail(rank_file(run_directory, rank))
        for event in tail.read():
            of_rank.add(event)
        of_rank.broken_lines = tail.broken_lines
    if any(of_rank.broken_lines for of_rank in events.values()):
        most_steps = max((of_rank.steps for of_rank in events.values()), key=len)
        most_evaluations = max((of_rank.evaluations for of_rank in events.values()), key=len)
        for of_rank in events.values():
            of_rank.steps = _until_gap(of_rank.steps, most_steps)
            of_rank.evaluations = _until_gap(of_rank.evaluations, most_evaluations)
    return events


def _until_gap(rows: Sequence[OfStep], whole: Sequence[OfStep]) -> list[OfStep]:
    """Leave out what a rank reported after a line that was lost: ranks are compared row by row."""
    pairs = zip(rows, whole, strict=False)
    return [row for row, _ in takewhile(lambda pair: pair[0].step == pair[1].step, pairs)]


Events = Mapping[int, RankEvents]


def steps_of(events: Events, mesh: Mesh | None = None) -> list[record.StepPart]:
    """Steps that every rank finished, summed over the ranks; what ranks share counts once."""
    mesh = mesh or Mesh.data_parallel(len(events))
    return [_step(rows, mesh) for rows in zip(*(of_rank.steps for of_rank in events.values()), strict=False)]


def _step(rows: Sequence[StepEvent], mesh: Mesh) -> record.StepPart:
    """What is summed is None where one rank does not know its part, the loss also where one is not finite."""
    first = rows[0]
    targets = first.global_target_tokens  # None: an observed script
    norms = _known([row.gradient_norm for row in rows])
    partial = math.hypot(*norms) if norms is not None else None
    applied = [row.applied_learning_rate for row in rows if row.applied_learning_rate is not None]
    once = [row for rank, row in enumerate(rows) if mesh.counts_samples(rank)]
    hashes = _known([row.sample_hashes for row in once])
    counts = {
        name: None if (values := _known([getattr(row, name) for row in once])) is None else sum(values)
        for name in ("tokens", "target_tokens", "samples")
    }
    return record.StepPart(
        step=first.step,
        window=first.window,
        loss=_mean(
            [row.loss_sum for rank, row in enumerate(rows) if mesh.counts_loss(rank)],
            sum(row.loss_weight or 0.0 for row in rows) if targets is None else targets,
        ),
        gradient_norm=partial if first.norm_is_partial else first.gradient_norm,
        learning_rate=first.learning_rate,
        applied_learning_rate=max(applied, key=lambda rate: abs(rate - first.learning_rate), default=None),
        applied_gradient_norm=_applied_gradient_norm(rows),
        **counts,
        seconds=max(row.seconds for row in rows),
        sample_hashes=None if hashes is None else f"{sum(int(h, 16) for h in hashes) % 2**64:016x}",
    )


def whole_weights(shares: Sequence[Share], rank: int) -> tuple[dict[str, Ranges], str, int]:
    """The ranges of each parameter; of the copy that this rank has a part of the digest, and the elements.

    SHA-256 over the sorted (name, shape, sum of the contents). Raises HarnessError where the ranges are not
    the whole.
    """
    ranges = {name: _ranges(name, shares) for name in dict.fromkeys(name for one in shares for name in one)}
    lines, count = [], 0
    for name, of_name in ranges.items():
        parts = [shares[holder][name] for holder in copy_of(rank, of_name)]
        lines.append(f"{name} {parts[0].shape} {sum(part.content for part in parts) % 2**64:016x}")
        count += math.prod(parts[0].shape)
    return ranges, hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() + DIGEST_KIND, count


def _ranges(name: str, shares: Sequence[Share]) -> Ranges:
    """Raises HarnessError unless the ranges of all ranks are the parameter, each element in one of them."""
    found: dict[tuple[int, int], list[int]] = {}
    shape: tuple[int, ...] = ()
    for rank, share in enumerate(shares):
        if name in share:
            held = share[name]
            shape = held.shape
            if held.elements or not math.prod(shape):
                found.setdefault((held.start, held.elements), []).append(rank)
    position = 0
    for start, elements in sorted(found):
        if start != position:
            break
        position += elements
    if position != math.prod(shape) or sum(elements for _, elements in found) != position:
        raise HarnessError(
            f"the ranks' ranges of {name} are not its {math.prod(shape)} elements: "
            f"{', '.join(f'{start} to {start + elements}' for start, elements in sorted(found))}; "
            "`Engine.weight_pieces` of this backend leaves some out, or cuts them in two ways"
        )
    return found


def copy_of(rank: int, ranges: Ranges) -> list[int]:
    """The ranks that together hold one copy: the n-th of each range, as this one is of its own."""
    place = next((holders.index(rank) for holders in ranges.values() if rank in holders), 0)
    return [holders[min(place, len(holders) - 1)] for holders in ranges.values()]


def _known(values: Sequence[Value | None]) -> list[Value] | None:
    """All of them; None where one is None."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _mean(sums: Sequence[float | None], targets: float) -> float | None:
    """Mean over target tokens; None where a rank's sum is not finite, or without targets."""
    known = _known(sums)
    return sum(known) / targets if known is not None and targets else None


WHOLE = 0.999
"""Share of the elements from which on a gradient is seen complete; partitions may be padded."""
APART = 1e-2
"""Relative difference of two norms that rounding does not make."""


def clipped_apart(row: StepEvent, other: StepEvent) -> bool:
    """Whether two ranks that hold all gradients, and were told one norm, clipped them to different ones."""
    mine, its = row.applied, other.applied
    if mine is None or its is None or min(mine.share, its.share) < WHOLE:
        return False
    if row.norm_is_partial or row.gradient_norm != other.gradient_norm or not (mine.squares and its.squares):
        return False
    return abs((mine.squares / its.squares) ** 0.5 - 1) > APART


def _applied_gradient_norm(rows: Sequence[StepEvent]) -> float | None:
    """Ranks hold disjoint parts of the gradient, or all of it each; the sum of their shares decides.

    None also where a part is missing, or where ranks that hold all of it were given different ones.
    """
    applied = [
        (row.applied.squares, row.applied.share)
        for row in rows
        if row.applied and row.applied.squares is not None
    ]
    if len(applied) < len(rows):
        return None
    seen = sum(share for _, share in applied)
    if seen < WHOLE or any(clipped_apart(row, rows[0]) for row in rows):
        return None
    copies = round(seen)
    return float((sum(squares for squares, _ in applied) / copies) ** 0.5)


def evaluations_of(events: Events, mesh: Mesh) -> list[record.EvaluationPart]:
    return [
        record.EvaluationPart(
            step=rows[0].step,
            loss=_mean([row.loss_sum for rank, row in enumerate(rows) if mesh.counts_loss(rank)], targets),
            target_tokens=targets,
            samples=rows[0].samples,
            seconds=max(row.seconds for row in rows),
        )
        for rows in zip(*(of_rank.evaluations for of_rank in events.values()), strict=False)
        for targets in (sum(row.target_tokens for rank, row in enumerate(rows) if mesh.counts_samples(rank)),)
    ]


# The texts of CUDA and HIP runtimes, NCCL and RCCL, cuBLAS, cuDNN, cuSOLVER and cuSPARSE, torch's allocators
# of device, pinned and host memory, C++ and the kernel.
_OUT_OF_MEMORY = re.compile(
    r"\bout ?of ?memory\b"  # CUDA out of memory; HIP error: out of memory; torch.OutOfMemoryError
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
    r"|failed to (?:cuda|hip) (?:calloc|malloc|host alloc)"  # NCCL: ncclUnhandledCudaError, its last error
    r"|(?:CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_\w*ALLOC\w*"
    # not "cannot allocate memory in static TLS block", by which the loader refuses a library
    r"|(?:can't|cannot|not enough memory to|failed to) allocate (?:memory(?! in static TLS)|pinned)"
    r"|DefaultCPUAllocator: not enough memory"
    r"|std::bad_alloc\b|^[\w.]*MemoryError\b",
    re.IGNORECASE,
)
_CAUGHT = re.compile(r"warning\b|\bwarn\b", re.IGNORECASE)
"""A line that warns may be of memory that ran out and was found elsewhere."""
_LEAST_OF_NCCL = re.compile(r"NCCL WARN", re.IGNORECASE)


def speaks_of_out_of_memory(message: str) -> bool:
    """Whether the message of an exception says that memory ran out, on a device, pinned or of the host."""
    return _OUT_OF_MEMORY.search(message) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: what was raised says so, or what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        # torch.OutOfMemoryError, without torch
        of_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(current).__mro__)
        if isinstance(current, MemoryError) or of_torch or speaks_of_out_of_memory(said(current)):
            return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


_LOST_PEER = re.compile(
    r"connection (?:reset|closed|refused|was likely closed)|broken pipe|\bpeer\b"
    r"|socket (?:timeout|closed)|timed out|timeout|DistNetworkError|DistStoreError|NCCL|store->get|recvvalue",
    re.IGNORECASE,
)


def is_of_lost_peer(kind: str, message: str) -> bool:
    """Whether a library says so of a rank that it waits for: it is gone, or did not come in time."""
    return _LOST_PEER.search(f"{kind} {message}") is not None


def line_of_out_of_memory(log: str) -> str | None:
    """The first line of a log by which memory ran out; None: no line says so.

    For a process that was killed without a word of its own: warnings of libraries that went on do not count.
    """
    for line in log.splitlines():
        is_warning = _CAUGHT.search(line) and not _LEAST_OF_NCCL.search(line)
        if not is_warning and speaks_of_out_of_memory(line):
            return line.strip()
    return None
