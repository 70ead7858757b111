"""Turns what ranks left behind into a record, whether they finished or not."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import psutil

from harness import record
from harness.backends import registry
from harness.backends.base import Effective
from harness.backends.mesh import Mesh
from harness.files import write_atomically
from harness.record.measured import PerStep
from harness.record.provenance import environment, package_versions
from harness.run_directory import rank_state
from harness.run_directory.events import (
    Events,
    FailureEvent,
    FinalEvent,
    RankEvents,
    SetupEvent,
    StepEvent,
    clipped_apart,
    evaluations_of,
    has_ended_well,
    has_said_its_end,
    is_of_lost_peer,
    line_of_out_of_memory,
    read_events,
    steps_of,
)
from harness.run_directory.request import (
    RankExit,
    RunRequest,
    checkpoint_folder,
    launcher_log,
    numbered_file,
    rank_exit,
    rank_file,
    rank_log,
    rank_owner,
    snapshot_file,
    trace_file,
    weights_folder,
)
from harness.safe_text import described, encodable

EVENTS_LOST = 74
"""Exit code of a rank that could not write its events: EX_IOERR of sysexits.h."""
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that SIGTERM ended, without and with a last word."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a run was ended from outside."""

    status: record.Status
    kind: str
    cause: str
    """A sentence without its end: 'after N steps' follows."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the processes of a run ended."""

    exit_codes: dict[int, int | None]
    """By rank; None: it still ran when it was ended."""
    ended_at: Mapping[int, float] = field(default_factory=dict)
    """When the end of a rank was seen, seconds since the epoch."""
    vanished: frozenset[int] = frozenset()
    """Ranks that are gone with whoever would have noted their exit codes."""
    stopped: Literal["timeout", "stuck", "interrupted"] | None = None
    verdict: Verdict | None = None
    """Counts more than what the ranks say, unless all of them finished."""


def signal_name(code: int) -> str:
    """'SIGKILL' for exit code -9 of a process."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


UNNOTICED_SECONDS = 1.0
"""So long may a launcher take to see that a process is gone; its peers may fail earlier."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How one rank ended before its time."""

    rank: int
    exit_code: int | None
    failure: FailureEvent | None = None
    """What the rank itself said; None: it said nothing."""
    order: tuple[int, float]
    """The least is the cause; the others follow from it."""


def cause_of(events: Mapping[int, RankEvents], outcome: Outcome) -> Cause | None:
    """The rank that ended first without having finished; None: no rank ended by itself.

    Libraries abort where a peer is gone; who is killed otherwise, or leaves, is the cause.
    """
    causes = []
    for rank, of_rank in events.items():
        code, ended_at = outcome.exit_codes.get(rank), outcome.ended_at.get(rank)
        failure, stopped = next(iter(of_rank.failures), None), of_rank.stopped
        if outcome.stopped is not None and code is None:
            continue  # it still ran when the launcher ended it
        if failure is not None:
            misses_a_peer = failure.status == "failed" and is_of_lost_peer(
                failure.error_kind, failure.message
            )
            order = (1 if misses_a_peer else 0), failure.at
        elif stopped is not None or (code in TERMINATED and not of_rank.done):
            if code not in TERMINATED and outcome.stopped is not None:
                continue
            order = 1, (stopped.at if stopped is not None else ended_at) or 0.0
        elif code == -signal.SIGABRT and not of_rank.has_ended:
            order = 1, ended_at or 0.0
        elif code is not None and not of_rank.has_ended:
            order = 0, 0.0 if ended_at is None else ended_at - UNNOTICED_SECONDS
        elif rank in outcome.vanished:
            order = 1, 0.0
        elif code is None and not of_rank.has_ended and outcome.exit_codes:
            order = 2, 0.0
        else:
            continue
        causes.append(Cause(rank=rank, exit_code=code, failure=failure, order=order))
    return min(causes, key=lambda cause: (cause.order, cause.rank), default=None)


KIND = "CollectiveMismatch"
_GLOO = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""gloo/transport/tcp/pair.cc; thrown on a thread of its own, so that the process usually aborts."""
_DEEPSPEED = re.compile(r"Detected a disagreement on list (?:length|contents) between rank0 and rank\d+")
"""DeepSpeed 0.19.8, runtime/zero/utils.py, in the first two steps of stage 3."""


def mismatch_error(
    run_directory: Path, events: Mapping[int, RankEvents], *, misses_a_peer: bool
) -> record.ErrorPart | None:
    """What a record says of ranks that disagree on a collective; None: no rank noticed that they do.

    Whoever received the wrong number of bytes noticed it; which rank is at fault only recorders can tell.
    These are believed where a rank noticed it or lost a peer.
    """
    noticed = {}
    for rank, of_rank in events.items():
        said = "\n".join(failure.message for failure in of_rank.failures)
        log = "" if of_rank.has_ended else rank_state.read_log(rank_log(run_directory, rank))
        if (found := _GLOO.search(f"{said}\n{log}")) is not None:
            noticed[rank] = f"rank {rank} received {found[1]} bytes where it waited for {found[2]}"
        elif _DEEPSPEED.search(said) is not None:
            noticed[rank] = f"rank {rank} gathers the weights of other modules than rank 0"
    hang = rank_state.hang_of(run_directory, events.keys()) if noticed or misses_a_peer else None
    recorded = hang if hang is not None and hang.is_mismatch else None
    if not noticed and recorded is None:
        return None
    blamed = next(iter(recorded.culprits), None) if recorded else None
    shown = next(iter(noticed), blamed or 0)
    verdict = recorded.verdict if recorded else None
    parted = rank_state.parting(run_directory, len(events))
    said = "; ".join(filter(None, [parted, verdict, noticed.get(shown)]))
    return record.ErrorPart(
        kind=KIND,
        message=f"the ranks disagree on a collective: {said}; `ranks` and the logs show where each rank was",
        rank=blamed,
        **record.ErrorPart.shared(rank_state.read_position(run_directory, shown)),
        log_tail=_log_tail(run_directory, shown),
        ranks=rank_state.rank_states(run_directory, len(events)),
    )


def status_of(
    run_directory: Path, events: Events, steps: list[record.StepPart], outcome: Outcome
) -> tuple[record.Status, record.ErrorPart | None]:
    """The status of a run, and why it has no complete result; `steps` are those that every rank finished."""
    if all(of_rank.done for of_rank in events.values()):
        return _finished(steps, events)
    if outcome.verdict is not None:
        return outcome.verdict.status, record.ErrorPart(
            kind=outcome.verdict.kind,
            message=f"{outcome.verdict.cause} after {len(steps)} steps",
            log_tail=_log_tail(run_directory, 0),
            ranks=rank_state.rank_states(run_directory, len(events)),
        )
    cause = cause_of(events, outcome)
    if (error := _silent_out_of_memory(run_directory, events, cause)) is not None:
        return "oom", error
    misses_a_peer = cause is not None and cause.order[0] > 0
    if cause is not None and (error := mismatch_error(run_directory, events, misses_a_peer=misses_a_peer)):
        return "failed", error
    if any(of_rank.reasons for of_rank in events.values()) and (cause is None or misses_a_peer):
        return "unsupported", None
    note = rank_state.read_note(run_directory)
    # What a rank said that was ended because all of them were stuck is no cause.
    own = (
        cause is not None
        and not misses_a_peer
        and (cause.failure or (note and cause.rank in note.gone_ranks))
    )
    if cause is not None and (note is None or own):
        error = _error(run_directory, events, cause)
        if misses_a_peer:
            error = _with_waits(run_directory, len(events), outcome, error)
        return (cause.failure.status if cause.failure else "failed"), error
    if outcome.stopped == "interrupted":
        return "failed", interrupted_error(run_directory, len(events), len(steps))
    if note is not None or outcome.stopped == "timeout":
        note = note or rank_state.StuckNote(kind="Timeout", reason="the time limit of the run passed")
        note = note.model_copy(update={"reason": f"stopped after {len(steps)} steps: {note.reason}"})
        error = rank_state.stuck_error(run_directory, len(events), note)
        return "timeout", error.model_copy(update={"log_tail": _log_tail(run_directory, error.rank or 0)})
    cause = Cause(rank=0, exit_code=outcome.exit_codes.get(0), order=(0, 0))
    return "failed", _error(run_directory, events, cause)


INTERRUPTED = "interrupted by the user"


def interrupted_error(run_directory: Path, world_size: int, steps: int) -> record.ErrorPart:
    """What a record says of a run that was told to end, also where its ranks stood if they stood still."""
    ended = f"{INTERRUPTED} after {steps} steps"
    if (
        note := rank_state.read_note(run_directory) or rank_state.still_note(run_directory, world_size)
    ) is None:
        ranks = rank_state.rank_states(run_directory, world_size)
        return record.ErrorPart(kind="Interrupted", message=ended, ranks=ranks)
    note = note.model_copy(update={"reason": f"{ended}: {note.reason}"})
    return rank_state.stuck_error(run_directory, world_size, note).model_copy(update={"kind": "Interrupted"})


def _finished(steps: list[record.StepPart], events: Events) -> tuple[record.Status, record.ErrorPart | None]:
    index = next((index for index, step in enumerate(steps) if step.loss is None), None)
    if index is None:
        return "ok", None
    own = [rank for rank, of_rank in events.items() if of_rank.steps[index].loss_sum is None]
    is_of_one = len(own) == 1 < len(events)
    return "diverged", record.ErrorPart(
        kind="NotFinite",
        message=f"the loss is not finite from step {steps[index].step} on",
        rank=own[0] if is_of_one else None,
        step=steps[index].step,
        phase="forward",
    )


def _silent_out_of_memory(
    run_directory: Path, events: Events, cause: Cause | None
) -> record.ErrorPart | None:
    """Error of a rank that ran out of memory and was ended before it could say so; None: there is none.

    NCCL's watchdog aborts the process, or a synchronisation of the exception's way out never returns. What a
    rank said itself counts more, unless it only misses a peer.
    """
    if cause is not None and cause.failure is not None and cause.order[0] == 0:
        return None
    for rank, of_rank in events.items():
        if of_rank.has_ended:
            continue
        line = line_of_out_of_memory(rank_state.read_log(rank_log(run_directory, rank)))
        if line is not None:
            own = cause.exit_code if cause is not None and cause.rank == rank else None
            error = _error(run_directory, events, Cause(rank=rank, exit_code=own, order=(0, 0)))
            return error.model_copy(update={"kind": "OutOfMemory", "message": rank_state.shown_text(line)})
    return None


_KILLERS: dict[int, str] = {
    signal.SIGKILL: " (the kernel's out-of-memory killer ends processes so)",
    signal.SIGABRT: " (libraries abort so; gloo where ranks give a collective other sizes)",
}


def _error(run_directory: Path, events: Events, cause: Cause) -> record.ErrorPart:
    """What a record says of the rank that a run is blamed on."""
    rank, failure, code = cause.rank, cause.failure, cause.exit_code
    position = rank_state.read_position(run_directory, rank)
    own = {"rank": rank, "exit_code": code, "log_tail": _log_tail(run_directory, rank)}
    if failure is not None:
        return record.ErrorPart(**record.ErrorPart.shared(failure) | own | {"kind": failure.error_kind})
    doing = position.doing if position is not None else None
    within = f" in {doing}" if doing else ""
    if code is None:
        message = f"the rank vanished{within} before it finished; its launcher did not see how it ended"
    elif code in TERMINATED:
        message = f"the rank was terminated{within} by SIGTERM, which its launcher had not sent"
    elif code < 0:
        hint = _KILLERS.get(-code, "")
        message = f"the rank was killed{within} by {signal_name(code)}{hint}"
    elif code == EVENTS_LOST:
        why = "is the disk full, or the folder read-only?"
        message = f"the rank could not write its events ({why}) and ended with exit code {code}"
    elif code == 0 and not (file := rank_file(run_directory, rank)).exists():
        message = f"{file.name}, the rank's events, is missing; the rank ended with exit code 0"
    elif code == 0 and (broken := events[rank].broken_lines):
        said = f"lines of {file.name} cannot be read ({broken}), its last perhaps"
        message = f"{said}; the rank ended with exit code 0"
    elif doing:
        message = f"{doing} ended the rank with exit code {code}; return what it makes instead"
    else:
        message = f"the rank ended with exit code {code} before it finished"
    return record.ErrorPart(kind="Exit", message=message, **record.ErrorPart.shared(position), **own)


def _with_waits(
    run_directory: Path, world_size: int, outcome: Outcome, error: record.ErrorPart
) -> record.ErrorPart:
    """Add to the error of a rank that gave a peer up where ranks stood, as far as they noted it."""
    ranks = rank_state.rank_states(run_directory, world_size)
    if rank_state.still_note(run_directory, world_size) is None:
        waits = [f"rank {rank.rank} waits in {rank.collective}" for rank in ranks if rank.collective]
        said = "; ".join([error.message, *waits[:2]])
        return error.model_copy(update={"message": said, "ranks": ranks if waits else []})
    stuck = rank_state.stuck_error(run_directory, world_size, rank_state.StuckNote(reason=""))
    return stuck.model_copy(
        update={
            "kind": error.kind,
            "message": f"{stuck.message}; rank {error.rank}: {error.message}",
            "exit_code": None if stuck.rank is None else outcome.exit_codes.get(stuck.rank),
            "log_tail": error.log_tail,
        }
    )


def _log_tail(run_directory: Path, rank: int) -> str:
    return rank_state.log_tail(rank_log(run_directory, rank)) or rank_state.log_tail(
        launcher_log(run_directory)
    )


PHASES = ("forward", "backward", "step")
WAITING = "waiting"


def assemble(run_directory: Path, request: RunRequest, outcome: Outcome) -> record.Record:
    """Build the record of a run from its ranks' events and the way its processes ended."""
    events = read_events(run_directory, request.world_size)
    steps = steps_of(events, _mesh(request))
    status, error = status_of(run_directory, events, steps, outcome)
    return _record(run_directory, request, events, steps, status, error)


def record_of_fault(run_directory: Path, request: RunRequest, error: BaseException) -> record.Record:
    """The record of a run of which nothing else can be said than that starting or reading it raised this."""
    events = {rank: RankEvents() for rank in range(request.world_size)}
    part = record.ErrorPart(kind=encodable(type(error).__name__), message=described(error))
    return _record(run_directory, request, events, [], "failed", part)


def _record(
    run_directory: Path,
    request: RunRequest,
    events: Events,
    steps: list[record.StepPart],
    status: record.Status,
    error: record.ErrorPart | None,
) -> record.Record:
    setup, final = events[0].setup, events[0].final
    mesh, scales = _mesh(request), request.job.training.precision == "fp16-mixed"
    both = record.Record.model_fields.keys() & RunRequest.model_fields
    asked = {name: getattr(request, name) for name in both}
    known = record.Record.shared(setup) | asked | measured_parts(events, steps)
    whole_model = mesh.size("pipeline") == 1
    left: list[tuple[record.ArtifactKind, int | None, Path]] = []
    for rank in range(request.world_size):
        left.append(("trace", rank, trace_file(run_directory, rank)))
        left.append(("memory snapshot", rank, snapshot_file(run_directory, rank)))
    if request.measure.keep_checkpoint:
        left.append(("checkpoint", None, checkpoint_folder(run_directory)))
    return record.Record(
        **known
        | {
            "status": status,
            "error": error,
            "cell": request.key,
            "reasons": list(dict.fromkeys(r for of_rank in events.values() for r in of_rank.reasons)),
            "resumed": request.resume.saved.resumed() if request.resume else None,
            "backend": _backend(request, setup, events[0].final),
            "world": record.WorldPart(
                **record.WorldPart.shared(request),
                collectives=setup.collectives if setup else ("nccl" if request.device == "cuda" else "gloo"),
                dimensions=[record.DimensionPart(name=name, size=size) for name, size in mesh.sizes]
                if mesh.shares_samples
                else [],
            ),
            "ranks": [
                part.model_copy(
                    update={"otherwise": otherwise(events[part.rank], events[0], whole_model=whole_model)}
                )
                for part in known["ranks"]
            ],
            "environment": run_environment(run_directory).model_copy(
                update={
                    "broken_event_lines": sum(of_rank.broken_lines for of_rank in events.values()),
                    "accelerator": setup.accelerator if setup else None,
                    "launcher_settings": request.launcher_settings,
                }
            ),
            "final_weights": final.weights if final else None,
            "moment_norms": _moment_norms(events),
            "observed": _observed(events, mesh),
            "eval": evaluations_of(events, mesh),
            "answers": _answers(events, mesh),
            "turns": _turns(events),
            "skipped_steps": sum(step.gradient_norm is None for step in steps) if scales else 0,
            "artifacts": [
                record.ArtifactPart(kind=kind, rank=rank, path=path.name)
                for kind, rank, path in left
                if path.exists()
            ],
        }
    )


def measured_parts(events: Events, steps: list[record.StepPart]) -> dict[str, Any]:
    """Fields of a record that the ranks' measurements fill."""
    windows: list[str] = [step.window for step in steps]
    measured = [of_rank.measured for of_rank in events.values() if of_rank.measured]
    return {
        "steps": steps,
        "windows": record.WindowsPart(
            **{name: windows.count(name) for name in record.WindowsPart.model_fields}
        ),
        "ranks": [part for rank in events if (part := rank_part(rank, events[rank])) is not None],
        "comm": [row for of_rank in measured for row in of_rank.communication],
    }


def assemble_refused(run_directory: Path, request: RunRequest, reason: str) -> record.Record:
    """Build the record of a run whose ranks were not started."""
    events = {rank: RankEvents() for rank in range(request.world_size)}
    events[0].reasons.append(reason)
    return _record(run_directory, request, events, [], "unsupported", None)


def _backend(request: RunRequest, setup: SetupEvent | None, final: FinalEvent | None) -> record.BackendPart:
    entry, options = registry.parse(request.backend)
    own = {"label": request.backend, "name": entry.name, "options": options.model_dump(mode="json")}
    in_force = final.in_force if setup and final else {}
    changed = {
        name: [value, getattr(setup.effective, name)]
        for name, value in in_force.items()
        if setup and value != getattr(setup.effective, name)
    }
    return record.BackendPart(
        **record.BackendPart.shared(setup)
        | own
        | {"given": request.given, "changed": changed}
        | versions_of(setup)
    )


def versions_of(setup: SetupEvent | None) -> dict[str, Any]:
    """The field `versions` of a backend: as rank 0 saw them, else those of this environment."""
    return {"versions": (setup.versions if setup else None) or package_versions()}


def _turns(events: Events) -> record.TurnsPart | None:
    turns = events[0].turns
    if not turns:
        return None
    return record.TurnsPart(
        steps=turns[0].steps,
        places=[turn.place for turn in turns],
        beside=sorted({run for turn in turns for run in turn.beside}),
        waited_seconds=sum(turn.waited_seconds for turn in turns),
        waited_process_seconds=max(
            sum(turn.waited_process_seconds for turn in of_rank.turns) for of_rank in events.values()
        ),
    )


def _moment_norms(events: Events) -> dict[str, tuple[float, float]]:
    """{} where a rank did not say what it holds, or a value is not finite."""
    sums = [of_rank.final.moment_sums if of_rank.final else None for of_rank in events.values()]
    if None in sums:
        return {}
    added: dict[str, tuple[float, float]] = {}
    for one in sums:
        for name, (first, second) in (one or {}).items():
            before = added.get(name, (0.0, 0.0))
            added[name] = before[0] + first, before[1] + second
    if not all(0 <= value < math.inf for pair in added.values() for value in pair):
        return {}
    return {name: (first**0.5, second**0.5) for name, (first, second) in added.items()}


def _observed(events: Events, mesh: Mesh) -> record.ObservedPart | None:
    """As rank 0 saw it; of a pipeline's ranks each trains parameters of its own."""
    seen = [of_rank.final.observed for of_rank in events.values() if of_rank.final is not None]
    first = events[0].final
    if first is None:
        return None
    draws = [part.draws for part in seen]
    observed = first.observed.model_copy(update={"draws": any(draws) if None not in draws else None})
    if mesh.size("pipeline") == 1:
        return observed
    left_out = set.intersection(*(set(part.parameters_left_out) for part in seen))
    return observed.model_copy(update={"parameters_left_out": sorted(left_out)})


def _mesh(request: RunRequest) -> Mesh:
    return registry.mesh_of(request.backend, request.world_size)


def rank_part(rank: int, events: RankEvents) -> record.RankPart | None:
    """What one rank measured; None: it never was ready to train."""
    setup, final, steps = events.setup, events.final, events.steps
    if setup is None:
        return None
    known = (
        {"memory": []}
        | record.RankPart.shared(setup)
        | record.RankPart.shared(events.measured)
        | record.RankPart.shared(final)
    )
    for name, column in record.RankPart.model_fields.items():
        for mark in column.metadata:
            if isinstance(mark, PerStep):
                values = [getattr(row, mark.field) for row in steps]
                known[name] = [] if mark.known and None in values else values
    # A pipeline's ranks also wait for other stages.
    phases = [*PHASES, *([WAITING] if any(WAITING in row.phase_seconds for row in steps) else [])]
    figures = dict.fromkeys(name for row in steps for name in row.figures)
    return record.RankPart(
        **known,
        step_figures={name: [row.figures.get(name) for row in steps] for name in figures},
        phase_seconds={phase: [row.phase_seconds.get(phase, 0.0) for row in steps] for phase in phases},
        batch_digests=[row.batch_digests for row in steps if row.batch_digests is not None],
        without_gradient=_without_gradient(steps),
        passes=_passes(steps),
        initial_digest=setup.initial_weights.digest if setup.initial_weights else None,
        final_digest=final.weights.digest if final and final.weights else None,
        checkpoints=[event.part for event in events.checkpoints],
    )


def _without_gradient(steps: Sequence[StepEvent]) -> dict[int, list[str] | None]:
    """Parameters without a gradient, by the first step of which that list holds."""
    known = takewhile(lambda row: not row.gradients_unknown, steps)
    found: dict[int, list[str] | None] = {
        row.step: row.without_gradient for row in known if row.without_gradient is not None
    }
    unknown = next((row.step for row in steps if row.gradients_unknown), None)
    if found and unknown is not None:
        found[unknown] = None
    return found


def _passes(steps: Sequence[StepEvent]) -> dict[int, tuple[int, int] | None]:
    """Passes of a step, by the first step of which they hold; empty where no step's are known."""
    found: dict[int, tuple[int, int] | None] = {}
    last: tuple[int, int] | None = None
    for row in steps:
        if row.passes != last:
            found[row.step] = last = row.passes
    return found


def _answers(events: Events, mesh: Mesh) -> record.AnswersPart | None:
    """Answers of every data rank; None where one of them gave none."""
    counted = [of_rank for rank, of_rank in events.items() if mesh.counts_samples(rank)]
    parts = [of_rank.final.answers if of_rank.final else None for of_rank in counted]
    known = [part for part in parts if part is not None]
    given = sorted((answer for part in known for answer in part.given), key=lambda answer: answer.sample)
    if len(known) < len(parts) or not given:
        return None
    return record.AnswersPart(
        exact_match=100 * sum(answer.exact_match for answer in given) / len(given),
        f1=100 * sum(answer.f1 for answer in given) / len(given),
        seconds=max(part.seconds for part in known),
        given=given,
    )


def clean_up(run_directory: Path, request: RunRequest) -> None:
    """Remove initial weights, and a checkpoint that was not to be kept. The ranks have ended."""
    shutil.rmtree(weights_folder(run_directory), ignore_errors=True)
    if not request.measure.keep_checkpoint:
        shutil.rmtree(checkpoint_folder(run_directory), ignore_errors=True)


NETWORK = Path("/sys/class/net")
node_file = numbered_file("node-{:05d}.json")
"""Where the first rank of a node describes it."""


def write_node(run_directory: Path, node: int) -> None:
    write_atomically(node_file(run_directory, node), describe_node().model_dump_json())


class NodeFile(record.Part):
    environment: record.EnvironmentPart
    topology: record.NodePart


def read_nodes(run_directory: Path) -> list[NodeFile]:
    """What the nodes reported, in order; empty if the launcher knows its only node itself."""
    found = (rank_state.read_part(path, NodeFile) for path in sorted(run_directory.glob("node-*.json")))
    return [node for node in found if node is not None]


def run_environment(run_directory: Path) -> record.EnvironmentPart:
    """The environment of a record: of the first node, with the topology of every node under 'nodes'."""
    nodes = read_nodes(run_directory)
    if not nodes:
        return environment()
    return nodes[0].environment.model_copy(update={"nodes": [node.topology for node in nodes]})


def describe_node() -> NodeFile:
    """Environment of this machine, and how its processors, GPUs and networks are laid out.

    Interfaces are those that are up, with their speed where the kernel knows one; the topology of GPUs is
    that of `nvidia-smi topo -m`.
    """
    facts = environment().model_copy(update={"started_at": datetime.now(UTC).isoformat(timespec="seconds")})
    addresses = psutil.net_if_addrs()
    interfaces = [
        record.InterfacePart(
            name=name,
            addresses=[one.address for one in addresses.get(name, []) if one.family == socket.AF_INET],
            megabits_per_second=state.speed or None,
            mtu_bytes=state.mtu,
            infiniband=(NETWORK / name / "device" / "infiniband").exists(),
        )
        for name, state in psutil.net_if_stats().items()
        if state.isup and name != "lo"
    ]
    gpu_topology = None
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        gpu_topology = done.stdout.splitlines() if done.returncode == 0 else None
    topology = record.NodePart(
        host=socket.gethostname(),
        cpu=facts.cpu,
        cores=facts.cores,
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=facts.memory_bytes,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        gpus=facts.gpus,
        gpu_topology=gpu_topology,
        interfaces=interfaces,
    )
    return NodeFile(environment=facts, topology=topology)


OF_PROCESS = ("tf32", "deterministic")
OF_MODEL = (
    "parameters_left_out", "optimizer_used", "optimizer_steps", "learning_rates", "master_dtypes",
    "optimizer_state_dtypes", "compute_dtype", "tied_parameters", "frozen_parameters", "frozen_dtypes",
    "attention", "activation_checkpointing", "compiled", "dropout", "evaluating_in_training",
    "training_in_evaluation", "still_buffers",
)  # fmt: skip
"""Fields of `ObservedPart`; the stages of a pipeline need not agree in them."""
IN_FORCE = (
    "strategy", "parameter_dtype", "autocast_dtype", "master_dtype", "gradient_dtype", "reduce_dtype",
    "optimizer", "gradient_clipping", "accumulation_steps", "gradient_synchronisation", "loss_scale",
    "gather_dtype", "accumulation_dtype",
)  # fmt: skip
"""Fields of `Effective`."""
NONE_IS_A_VALUE = ("autocast_dtype", "gradient_clipping", "loss_scale")
"""Of these None says that there is none."""


Changes = Mapping[int, list[dict[str, Any]]]


def otherwise(rank: RankEvents, first: RankEvents, *, whole_model: bool) -> dict[str, list[Any]]:
    """Values that this rank and rank 0 have unlike, by name; what one of them does not know is passed over.

    whole_model: False: ranks hold different layers.
    """
    found: dict[str, list[Any]] = {}
    if rank is first:
        return found
    steps = list(zip(rank.steps, first.steps, strict=False))
    for mine, its in steps:
        pair = [mine.applied_learning_rate, its.applied_learning_rate]
        if _unlike(*pair):
            found[f"learning rate of step {mine.step}"] = pair
            break
    for mine, its in steps:
        if clipped_apart(mine, its):  # whose squares are known of both
            norms = [row.applied.squares**0.5 for row in (mine, its) if row.applied and row.applied.squares]
            found[f"norm of the clipped gradient of step {mine.step}"] = norms
            break
    if rank.setup is not None and first.setup is not None and whole_model:
        found |= _fields(rank.setup.effective, first.setup.effective, IN_FORCE)
    if rank.final is None or first.final is None:
        return found
    if _unlike(rank.final.loss_scale, first.final.loss_scale):
        found["loss scale after the training"] = [rank.final.loss_scale, first.final.loss_scale]
    for name in rank.final.in_force.keys() & first.final.in_force.keys():
        pair = [rank.final.in_force[name], first.final.in_force[name]]
        if pair[0] != pair[1] and name.replace("_", " ") not in found and whole_model:
            found[f"{name.replace('_', ' ')} after the training"] = pair
    mine_seen, other_seen = rank.final.observed, first.final.observed
    found |= _fields(mine_seen, other_seen, (*OF_PROCESS, *(OF_MODEL if whole_model else ())))
    return found | (dict(constants_apart(mine_seen, other_seen)) if whole_model else {})


def _unlike(mine: Any, other: Any) -> bool:
    return mine is not None and other is not None and mine != other


def _fields(
    mine: Effective | record.ObservedPart, other: Effective | record.ObservedPart, names: tuple[str, ...]
) -> dict[str, list[Any]]:
    """A rank whose part of every weight is empty knows none of their dtypes."""
    pairs = {name: [getattr(mine, name), getattr(other, name)] for name in names}
    return {
        name.replace("_", " "): pair
        for name, pair in pairs.items()
        if (pair[0] != pair[1] if name in NONE_IS_A_VALUE else _unlike(*pair))
        and not (name.endswith("dtypes") and [] in pair)
    }


def constants_apart(mine: record.ObservedPart, other: record.ObservedPart) -> Iterator[tuple[str, list[Any]]]:
    """Constants and parameters of the optimizers' groups: of lists of parameters what the other lacks.

    ', changed in step 3' is said of a constant that was the same before.
    """
    groups, others = mine.optimizer_groups, other.optimizer_groups
    if groups and others and len(groups) != len(others):
        yield "groups of the optimizer", [len(groups), len(others)]
        return
    changes = [seen.constants_by_step or {0: seen.optimizer_groups} for seen in (mine, other)]
    known = sorted({step for of_rank in changes for step in of_rank})
    for index, (group, its_like) in enumerate(zip(groups, others, strict=False)):
        for name in group.keys() & its_like.keys():
            pair = [group[name], its_like[name]]
            if pair[0] == pair[1]:
                continue
            if name == "parameters":
                pair = [[one for one in a if one not in b] for a, b in (pair, pair[::-1])]
            both = {step: [_at(of_rank, step, index, name) for of_rank in changes] for step in known}
            alike = [step for step, (own, its) in both.items() if own == its]
            later = [step for step in known if alike and step > alike[-1]]
            since = f", changed in step {later[0]}" if later else ""
            yield f"{name} of optimizer group {index}{since}", pair


def _at(changes: Changes, step: int, index: int, name: str) -> Any:
    """A constant in a step, or in the first of which it is known."""
    groups = changes[max((first for first in changes if first <= step), default=min(changes))]
    return groups[index].get(name) if index < len(groups) else None


PATIENCE_SECONDS = 2.0
"""Monitors note an end at once; a file system shows the note a little later."""
TOGETHER_SECONDS = 1.0
"""Ranks that were all told to end within this time were told by their launcher."""


def wait_for_ends(run_directory: Path, world_size: int) -> None:
    """Return when every rank has said or is known to have ended, or after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        # Last lines only: all events of 64 ranks and 1,000 steps take seconds to read.
        if all(has_said_its_end(run_directory, r) or _is_known(run_directory, r) for r in range(world_size)):
            return
        time.sleep(0.1)


def noted_exits(run_directory: Path, ranks: Iterable[int]) -> dict[int, RankExit]:
    """How ranks ended as their monitors noted it, the first to end first."""
    notes = {rank: rank_state.read_part(rank_exit(run_directory, rank), RankExit) for rank in ranks}
    known = {rank: note for rank, note in notes.items() if note is not None}
    return dict(sorted(known.items(), key=lambda item: (item[1].at, item[0])))


def _as_noted(noted: Mapping[int, RankExit], **more: Any) -> Outcome:
    codes: dict[int, int | None] = {rank: end.exit_code for rank, end in noted.items()}
    return Outcome(exit_codes=codes, ended_at={rank: end.at for rank, end in noted.items()}, **more)


def external_outcome(run_directory: Path, world_size: int) -> Outcome:
    """The exits that monitors noted, and which ranks vanished with their monitors."""
    noted = noted_exits(run_directory, range(world_size))
    events = read_events(run_directory, world_size)
    vanished = frozenset(
        rank
        for rank, of_rank in events.items()
        if rank not in noted and not of_rank.has_ended and is_gone(run_directory, rank)
    )
    told = [of_rank.stopped.at for of_rank in events.values() if of_rank.stopped is not None]
    if len(told) == len(events) > 0 and not vanished and max(told) - min(told) < TOGETHER_SECONDS:
        return Outcome(exit_codes={}, stopped="interrupted")  # by a user or a scheduler
    return _as_noted(noted, vanished=vanished)


def is_gone(run_directory: Path, rank: int) -> bool:
    """Whether the monitor of a rank is known to have ended."""
    owner = rank_state.read_part(rank_owner(run_directory, rank), rank_state.Owner)
    return owner is not None and owner.is_gone


def has_gone(run_directory: Path, rank: int) -> bool:
    """Whether a rank, or its monitor with it, is known to have ended before the rank was done."""
    return _is_known(run_directory, rank) and not has_ended_well(run_directory, rank)


def exits_before_stuck(run_directory: Path, note: rank_state.StuckNote) -> Outcome:
    """Exits of ranks that had ended by themselves before the others had to be ended."""
    return _as_noted(noted_exits(run_directory, note.gone_ranks), stopped="stuck")


def _is_known(run_directory: Path, rank: int) -> bool:
    return rank_exit(run_directory, rank).exists() or is_gone(run_directory, rank)
