"""The record of an observed script, from what its ranks left in the run directory."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from harness.backends import registry
from harness.backends.presets import ZERO_LIMITS
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import PlainName, Stored, read_plain, write_atomically
from harness.job.experiment import MeasureSection
from harness.record import BackendPart, ErrorPart, RankPart, Record, Status, StepPart, WeightsPart, WorldPart
from harness.record.provenance import environment
from harness.record.run import ObservationPart, seen_job
from harness.run_directory import assemble
from harness.run_directory.events import (
    ObservationEvent,
    RankEvents,
    SetupEvent,
    read_events,
    steps_of,
    whole_weights,
)
from harness.run_directory.rank_state import Owner, read_log
from harness.run_directory.request import RankExit
from harness.safe_text import KeptCommand, redacted

PATIENCE_SECONDS = 2.0
"""A launcher that was killed may be gone a little before its ranks."""


class ProcessStart(Owner):
    """A process that has imported torch."""

    rank: int | None
    """As the launcher's variables say, and once it trains as it is recorded; None: not known."""
    trains: bool = False
    """Whether the events of that rank are those of this process."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """What is known of the end of a rank's process."""

    start: ProcessStart
    exit_code: int | None = None
    """Negative: killed by that signal. None: it runs, or nobody noted its end."""
    at: float | None = None
    """When its end was first noted, seconds since the epoch."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None and not self.start.is_gone


def processes_folder(run_directory: Path) -> Path:
    """Where the files of the processes lie."""
    return run_directory / "processes"


def note_start(run_directory: Path, rank: int | None, *, trains: bool) -> None:
    """Note that this process is this rank."""
    start = ProcessStart(**Owner.myself().model_dump(), rank=rank, trains=trains)
    folder = processes_folder(run_directory)
    folder.mkdir(exist_ok=True)
    with (folder / str(start.process)).open("a" if trains else "w", encoding="utf-8") as file:
        file.write(start.model_dump_json() + "\n")


def note_end(run_directory: Path, process: int, exit_code: int) -> None:
    """Note the end of a process; nothing where it has not noted its start."""
    path = processes_folder(run_directory) / str(process)
    if path.exists():
        end = RankExit(exit_code=exit_code, at=time.time())
        with path.open("a", encoding="utf-8") as file:
            file.write(end.model_dump_json() + "\n")


def rank_ends(run_directory: Path) -> dict[int, RankEnd]:
    """End of the process that trained on each rank, the last one where ranks were restarted.

    Of a rank that never trained, of the first process: workers that it starts have its variables too.
    """
    found: dict[int, RankEnd] = {}
    for path in sorted(processes_folder(run_directory).glob("[0-9]*")):
        end: RankEnd | None = None
        for line in read_log(path).splitlines():
            try:
                end = RankEnd(start=ProcessStart.model_validate_json(line))
            except ValidationError:
                with suppress(ValidationError):  # a line that was cut short
                    noted = RankExit.model_validate_json(line)
                    end = end and replace(end, exit_code=noted.exit_code, at=end.at or noted.at)
        if end is None or (rank := end.start.rank) is None:
            continue
        known = found.get(rank)
        if known is None or _precedence(end.start) < _precedence(known.start):
            found[rank] = end
    return found


def wait_for_processes(run_directory: Path) -> None:
    """Return when no rank runs any more, or after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(end.is_running for end in rank_ends(run_directory).values()):
        time.sleep(0.05)


def _precedence(start: ProcessStart) -> tuple[bool, float]:
    return not start.trains, -start.started if start.trains else start.started


GLOO = "HARNESS_ACCELERATE_GLOO"
"""Variable that has Accelerate join CPU processes under DeepSpeed by gloo; any value."""
MOVED = ", moved"
"""Ends the label of the repetition whose weights are moved."""
REQUEST_NAME = "observe.json"
PREFIX = "observed-"
"""Of the backend's name in a record: 'observed-fsdp'."""
LOSS, INITIAL = "steps[].loss", "initial_weights"
"""Names of the loss and of the weights before the first step among the fields that may be unknown."""


class ScriptRow(Stored):
    """Which run of a comparison of scripts an observed command is."""

    label: str
    """Name of its row, and MOVED."""
    key: str
    """Equal for runs of one cell: the command and its files, what it was given, the measurement."""
    repeat: int = 0
    job_id: str | None = None
    """Of the first row that trained: rows are one job, whatever their strategies show; None: its own."""
    judged_by: str | None = None
    """Label of the row that the others are judged by."""
    is_moved: bool = False
    """Whether every weight is moved to the next number before the first step."""
    preset: str = "library-defaults"
    strategy: str | None = None
    """The built-in backend that the script was told to train under; None: it decides itself."""


class ObserveRequest(Stored):
    """What the processes of an observed command are asked to measure."""

    run_id: PlainName
    created_at: str
    command: KeptCommand
    """Of `harness observe`, for the record."""
    observed: KeptCommand
    """The command that is observed."""
    files: dict[str, str] = {}
    """Digest of each file that it names."""
    label: str = ""
    """What the user calls it."""
    measure: MeasureSection
    row: ScriptRow | None = None

    def write(self, run_directory: Path) -> None:
        """Write it without secrets: its readers measure, none of them starts the command."""
        write_atomically(run_directory / REQUEST_NAME, redacted(self.model_dump_json(indent=1)))

    @classmethod
    def read(cls, run_directory: Path) -> ObserveRequest:
        return cls.model_validate_json(read_plain(run_directory / REQUEST_NAME, MOST_DOCUMENT_BYTES))


def assemble_observed(
    run_directory: Path, request: ObserveRequest, exit_code: int, told_at: float | None = None
) -> Record | None:
    """Build the record of a command that ended with `exit_code`; None: no process of it trained.

    exit_code: negative where a signal ended it.
    told_at: when `harness observe` was told to end, seconds since the epoch; None: it was not.
    """
    of_all = read_events(run_directory, len(list(run_directory.glob("rank-*.jsonl"))))
    # What rank 0 saw, or the first rank that saw anything.
    seen = next((of_rank.observation for of_rank in of_all.values() if of_rank.observation), None)
    if seen is None:
        return None
    events = read_events(run_directory, seen.world_size)
    setup = events[0].setup
    job = seen_job(seen.seen)
    steps = steps_of(events)
    status, error = _status(run_directory, events, steps, seen, exit_code, told_at)
    row = request.row or ScriptRow(label="", key=hashlib.sha256(request.run_id.encode()).hexdigest()[:16])
    layout = to_jsonable_python(setup.layout) if setup else None
    # Another rate, or other samples, make another training.
    fed = [(step.sample_hashes, step.learning_rate) for step in steps]
    identity = json.dumps([job.job_id(), layout, fed], sort_keys=True)
    counts = [len(of_rank.steps) for of_rank in events.values()]
    least, most = min(counts), max(counts)  # ranks make unlike numbers of steps under torch's Join
    uneven = [f"ranks made {least} to {most} steps; the first {least} are recorded"] if least < most else []
    apart = [
        (bits[0].step, unlike)
        for bits in zip(*(of_rank.steps for of_rank in events.values()), strict=False)
        if (unlike := [n for n in bits[0].weight_bits if len({b.weight_bits.get(n) for b in bits}) > 1])
    ]
    rates = [event.group_learning_rates or [] for event in events[min(events)].steps]
    groups = range(max(map(len, rates), default=0))  # an optimizer may first step in a later step
    known = {name: getattr(request, name) for name in ("run_id", "created_at", "command", "measure")}
    known["initial_weights"] = weights = _initial_weights(events)
    parts = assemble.measured_parts(events, steps)
    if least == most:  # else constants at their ends are those of unlike steps
        parts["ranks"] = [
            part.model_copy(update={"otherwise": _otherwise(events, part)}) for part in parts["ranks"]
        ]
    return Record(
        **Record.shared(setup) | known | parts,
        status=status,
        error=error,
        skipped_steps=sum(event.group_learning_rates == [] for event in events[min(events)].steps),
        job=job,
        job_id=row.job_id or hashlib.sha256(identity.encode()).hexdigest()[:12],
        cell=row.key,
        repeat=row.repeat,
        backend=_backend(seen, setup, events, row),
        world=WorldPart(**WorldPart.shared(seen) | {
            "nodes": max(1, seen.world_size // seen.ranks_per_node), "preset": row.preset,
            "collectives": setup.collectives if setup else ("nccl" if seen.device == "cuda" else "gloo"),
            "threads_per_rank": seen.threads, "micro_batch_size": seen.micro_batch_size or 1,
        }),
        environment=assemble.run_environment(run_directory).model_copy(update={
            "broken_event_lines": sum(of_rank.broken_lines for of_rank in events.values()),
            "accelerator": setup.accelerator if setup else None,
        }),
        observed=events[0].final.observed if events[0].final else None,
        observation=seen.observation.model_copy(update={
            "files": request.files, "label": request.label,
            "unknown": {k: v for k, v in seen.observation.unknown.items() if not (weights and k == INITIAL)},
            "learning_rates": [
                [of_step[group] if group < len(of_step) else None for of_step in rates] for group in groups
            ],
            "notes": [*seen.observation.notes, *(uneven if status == "ok" else [])],
            "judged_by": row.judged_by, "is_moved": row.is_moved, "weights_apart": dict(apart[:1]),
        }),
    )  # fmt: skip


OF_SHARDS = ("groups", "learning_rate", "dtypes", "tensors", "parameters")
"""What ranks may have unlike of a group, or what is compared in each step."""


def _otherwise(events: Mapping[int, RankEvents], part: RankPart) -> dict[str, list[Any]]:
    """Constants of the optimizers, of which a rate is compared in each step."""
    mine, first = events[part.rank].final, events[0].final
    if mine is None or first is None or not (events[0].setup and events[0].setup.claim):
        return {}
    apart = assemble.constants_apart(mine.observed, first.observed)
    return {name: pair for name, pair in apart if name.split()[0] not in OF_SHARDS}


def _initial_weights(events: Mapping[int, RankEvents]) -> WeightsPart | None:
    """Of rank 0's copy; None: what ranks had noted is not the whole of the model that trains."""
    setup = events[0].setup
    shares = [of_rank.setup.share if of_rank.setup else {} for of_rank in events.values()]
    if setup is None or setup.layout is None or not shares[0]:
        return None
    if {bare.name for bare in setup.layout.parameters} - {*setup.layout.tied} != shares[0].keys():
        return None
    with suppress(HarnessError):
        _, digest, count = whole_weights(shares, 0)
        return WeightsPart(digest=digest, l2_norm=None, parameter_count=count)
    return None


def told_apart(record: Record, row: ScriptRow) -> Record:
    """The record, without figures where the script did not train under the strategy that it was given."""
    seen = record.observation.base if record.observation else None
    if row.strategy in (None, seen):
        return record
    alone = "each process alone" if record.world.world_size > 1 else "in one process"
    trained = alone if seen in (None, "single") else f"under {seen}"
    reason = f"the script trains {trained} where it was given {row.strategy}"
    none: dict[str, Any] = {"steps": [], "ranks": [], "comm": [], "windows": None}
    none["backend"] = record.backend.model_copy(update={"claim": None})
    why = {"status": "unsupported", "reasons": [reason]} if record.status == "ok" else {}
    return record.model_copy(update=none | why)


def record_of_no_training(
    request: ObserveRequest, world_size: int, device: str, base: Record | None, status: Status, **why: Any
) -> Record:
    """The record of a row of which no process trained, as the base would have it; `why`: its `error` or
    `reasons`."""
    assert request.row is not None
    row, name = request.row, PREFIX + (request.row.strategy or "script")
    known = {name: getattr(request, name) for name in ("run_id", "created_at", "command", "measure")}
    world = WorldPart(
        nodes=1, ranks_per_node=world_size, world_size=world_size, device=device,
        collectives="nccl" if device == "cuda" else "gloo", threads_per_rank=1, micro_batch_size=1,
        accumulation_steps=1, preset=row.preset,
    )  # fmt: skip
    return Record(
        **known, status=status, cell=row.key, repeat=row.repeat, environment=environment(),
        job=base.job if base else seen_job({}), job_id=row.job_id or row.key[:12],
        world=base.world if base else world, backend=BackendPart(label=row.label, name=name),
        observation=ObservationPart(
            command=request.observed, frameworks=[], files=request.files, judged_by=row.judged_by,
            is_moved=row.is_moved,
        ),
        **why,
    )  # fmt: skip


def record_of_abandoned(run_directory: Path) -> Record:
    """The record of a command whose observer was killed, from what its processes left."""
    request = ObserveRequest.read(run_directory)
    record = assemble_observed(run_directory, request, -signal.SIGKILL)
    if record is not None:
        return record if request.row is None else told_apart(record, request.row)
    request = request.model_copy(update={"row": request.row or ScriptRow(label=PREFIX, key=request.run_id)})
    error = ErrorPart(kind="LauncherLost", message="abandoned before a process of the script trained")
    return record_of_no_training(request, 1, "cpu", None, "failed", error=error)


def _status(
    run_directory: Path,
    events: Mapping[int, RankEvents],
    steps: list[StepPart],
    seen: ObservationEvent,
    exit_code: int,
    told_at: float | None,
) -> tuple[Status, ErrorPart | None]:
    """How the command ended. A loss that is not known is no loss that is not finite."""
    if LOSS in seen.observation.unknown:
        steps = [replace(step, loss=0.0) for step in steps]
    ends = {rank: end for rank, end in rank_ends(run_directory).items() if rank in events}
    events = {rank: _as_it_ended(of_rank, ends.get(rank), told_at) for rank, of_rank in events.items()}
    has_ended_well = all(of_rank.done for of_rank in events.values())
    codes: dict[int, int | None] = {rank: end.exit_code for rank, end in ends.items()}
    if len(events) == 1 and codes.get(0) is None:
        codes[0] = exit_code
    at = {rank: end.at for rank, end in ends.items() if end.at is not None}
    if told_at is not None:
        codes = {rank: code if at.get(rank, told_at) < told_at else None for rank, code in codes.items()}
    outcome = assemble.Outcome(
        exit_codes=codes, ended_at=at, stopped=None if told_at is None else "interrupted"
    )
    if told_at is not None and not (has_ended_well and exit_code == 0):
        if (cause := assemble.cause_of(events, outcome)) is None or cause.order[0] > 0:
            return "failed", assemble.interrupted_error(run_directory, len(events), len(steps))
    elif has_ended_well and exit_code != 0:
        message = f"the command {_ended(exit_code)} after {len(steps)} steps"
        return "failed", ErrorPart(kind="Exit", message=message, exit_code=exit_code)
    elif (error := _left_alone(events, ends, outcome, len(steps), exit_code)) is not None:
        return "failed", error
    status, error = assemble.status_of(run_directory, events, steps, outcome)
    if error is not None and error.rank is not None and error.step is None:
        error = error.model_copy(update={"step": len(events[error.rank].steps)})
    return status, error


def _as_it_ended(of_rank: RankEvents, end: RankEnd | None, told_at: float | None) -> RankEvents:
    """The exit code of its process counts more than what a rank said: it says 'done' before it is known.

    What was raised after the command had been told to end follows from that.
    """
    failures = [
        failure
        for failure in of_rank.failures
        if told_at is None or (failure.at < told_at and failure.error_kind != KeyboardInterrupt.__name__)
    ]
    if end is None or end.exit_code is None:
        return replace(of_rank, failures=failures)
    if end.exit_code == 0:
        return replace(of_rank, failures=[], done=True)
    return replace(of_rank, failures=failures, done=False)


def _left_alone(
    events: Mapping[int, RankEvents],
    ends: Mapping[int, RankEnd],
    outcome: assemble.Outcome,
    steps: int,
    exit_code: int,
) -> ErrorPart | None:
    """Ranks that outlive their launcher, or whose peers have left them; None: there are none."""
    running = [
        rank for rank in events if not events[rank].has_ended and rank in ends and ends[rank].is_running
    ]
    if running:
        verb, plural = ("runs", "") if len(running) == 1 else ("run", "s")
        named = f"rank{plural} {', '.join(map(str, running))}"
        message = f"the command {_ended(exit_code)} after {steps} steps, but {named} still {verb}"
        return ErrorPart(kind="LauncherLost", message=message, exit_code=exit_code)
    cause = assemble.cause_of(events, outcome)
    left = [rank for rank, of_rank in events.items() if of_rank.done]
    if cause is None or cause.failure is None or cause.order[0] == 0 or not left:
        return None
    first = min(left, key=lambda rank: (len(events[rank].steps), rank))
    message = (
        f"the rank ended with exit code 0 after {len(events[first].steps)} steps, but rank {cause.rank} went "
        f"on: {cause.failure.error_kind}: {cause.failure.message}"
    )
    return ErrorPart(kind="Exit", message=message, rank=first, exit_code=0, step=len(events[first].steps))


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {assemble.signal_name(code)}"


def _backend(
    seen: ObservationEvent, setup: SetupEvent | None, events: Mapping[int, RankEvents], row: ScriptRow
) -> BackendPart:
    """With the micro-steps that were seen, and which of them were seen to reduce gradients."""
    name = PREFIX + (seen.observation.base or "script")
    effective = setup.effective if setup else None
    if effective is not None:  # an epoch's last step may have fewer micro-steps, even the first
        effective = replace(effective, accumulation_steps=seen.accumulation_steps)
        early = [e.measured.early_reduced_bytes for e in events.values() if e.measured is not None]
        known = [size for size in early if size is not None]
        if known:
            synchronised = "every micro-step" if any(known) else "last micro-step"
            effective = replace(effective, gradient_synchronisation=synchronised)
    # What our file pins for a row is its preset.
    pinned = () if row.preset == "library-defaults" else ZERO_LIMITS
    options = {name: value for name, value in seen.options.items() if name not in pinned}
    label = row.label.removesuffix(MOVED)
    if row.strategy is not None and label.partition(":")[0] == row.strategy:  # else a file said it
        _, given = registry.parse(label)
        options |= given.model_dump(exclude_unset=True, exclude_none=True)
    own: dict[str, Any] = {"label": row.label or name, "name": name}
    own |= {"effective": effective, "options": options}
    if not seen.observation.has_form:
        own["claim"] = None
    return BackendPart(**BackendPart.shared(setup) | own | assemble.versions_of(setup))
