"""How a run ended, from its ranks' events and the way that its processes ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.record import ErrorPart, Status, StepPart
from harness.run_directory.blame import Cause, cause_of
from harness.run_directory.mismatch import mismatch_error
from harness.run_directory.out_of_memory import line_of_out_of_memory
from harness.run_directory.outcome import EVENTS_LOST, TERMINATED, Outcome, signal_name
from harness.run_directory.rank_events import RankEvents
from harness.run_directory.rank_state import read_position
from harness.run_directory.request import launcher_log, rank_log
from harness.run_directory.side_files import log_tail, read_log, shown_text
from harness.run_directory.stuck import StuckNote, rank_states, read_note, stuck_error

Events = Mapping[int, RankEvents]


def status_of(
    run_directory: Path, events: Events, steps: list[StepPart], outcome: Outcome
) -> tuple[Status, ErrorPart | None]:
    """The status of a run, and why it has no complete result; `steps` are those that every rank finished."""
    if all(of_rank.done for of_rank in events.values()):
        return _finished(steps, events)
    if outcome.verdict is not None:
        return outcome.verdict.status, ErrorPart(
            kind=outcome.verdict.kind,
            message=f"{outcome.verdict.cause} after {len(steps)} steps",
            log_tail=_log_tail(run_directory, 0),
            ranks=rank_states(run_directory, len(events)),
        )
    cause = cause_of(events, outcome)
    if (error := _silent_out_of_memory(run_directory, events, cause)) is not None:
        return "oom", error
    if cause is not None and (error := mismatch_error(run_directory, events)) is not None:
        return "failed", error
    if _was_refused(events, cause):
        return "unsupported", None
    if cause is not None and not _was_stuck(run_directory, cause):
        return (cause.failure.status if cause.failure else "failed"), _error(run_directory, cause)
    if outcome.stopped == "interrupted":
        return "failed", interrupted_error(run_directory, len(events), len(steps))
    note = read_note(run_directory)
    if note is not None or outcome.stopped == "timeout":
        note = note or StuckNote(kind="Timeout", reason="the time for the run passed")
        note = note.model_copy(update={"reason": f"stopped after {len(steps)} steps: {note.reason}"})
        error = stuck_error(run_directory, len(events), note)
        return "timeout", error.model_copy(update={"log_tail": _log_tail(run_directory, error.rank or 0)})
    cause = Cause(rank=0, exit_code=outcome.exit_codes.get(0), order=(0, 0))
    return "failed", _error(run_directory, cause)


def interrupted_error(run_directory: Path, world_size: int, steps: int) -> ErrorPart:
    """What a record says of a run that was told to end."""
    return ErrorPart(
        kind="Interrupted",
        message=f"interrupted by the user after {steps} steps",
        ranks=rank_states(run_directory, world_size),
    )


def _was_refused(events: Events, cause: Cause | None) -> bool:
    """Whether a rank named a reason why the run cannot be, and no other failed but for missing that rank."""
    refused = any(of_rank.reasons for of_rank in events.values())
    return refused and (cause is None or cause.order[0] > 0)


def _finished(steps: list[StepPart], events: Events) -> tuple[Status, ErrorPart | None]:
    index = next((index for index, step in enumerate(steps) if step.loss is None), None)
    if index is None:
        return "ok", None
    own = [rank for rank, of_rank in events.items() if of_rank.steps[index].loss_sum is None]
    is_of_one = len(own) == 1 < len(events)
    return "diverged", ErrorPart(
        kind="NotFinite",
        message=f"the loss is not finite from step {steps[index].step} on",
        rank=own[0] if is_of_one else None,
        step=steps[index].step,
        phase="forward",
    )


def _silent_out_of_memory(run_directory: Path, events: Events, cause: Cause | None) -> ErrorPart | None:
    """Of a rank that ran out of memory and was ended before it could say so; None: there is none.

    NCCL's watchdog aborts the process, or a synchronisation of the exception's way out never returns. What a
    rank said itself counts more, unless it only misses a peer.
    """
    if cause is not None and cause.failure is not None and cause.order[0] == 0:
        return None
    for rank, of_rank in events.items():
        if of_rank.has_ended:
            continue
        line = line_of_out_of_memory(read_log(rank_log(run_directory, rank)))
        if line is not None:
            own = cause.exit_code if cause is not None and cause.rank == rank else None
            error = _error(run_directory, Cause(rank=rank, exit_code=own, order=(0, 0)))
            return error.model_copy(update={"kind": "OutOfMemory", "message": shown_text(line)})
    return None


def _was_stuck(run_directory: Path, cause: Cause) -> bool:
    """Whether the rank was ended because all of them were stuck: what it said then is no cause."""
    note = read_note(run_directory)
    if note is None:
        return False
    return cause.order[0] > 0 or (cause.failure is None and cause.rank not in note.gone_ranks)


def _error(run_directory: Path, cause: Cause) -> ErrorPart:
    """What a record says of the rank that a run is blamed on."""
    rank, failure = cause.rank, cause.failure
    position = read_position(run_directory, rank)
    if failure is not None:
        step, phase = failure.step, failure.phase
    else:
        step, phase = (position.step, position.phase) if position else (None, None)
    return ErrorPart(
        kind=failure.error_kind if failure else "Exit",
        message=failure.message if failure else _exit_message(cause.exit_code),
        rank=rank,
        exit_code=cause.exit_code,
        step=step,
        phase=phase,
        log_tail=_log_tail(run_directory, rank),
    )


def _exit_message(code: int | None) -> str:
    if code is None:
        return "the rank vanished without having finished; who started it did not see how it ended"
    if code in TERMINATED:
        return "the rank was terminated by SIGTERM, which its launcher had not sent"
    if code < 0:
        hint = " (the kernel's out-of-memory killer ends processes so)" if code == -9 else ""
        return f"the rank was killed by {signal_name(code)}{hint}"
    if code == EVENTS_LOST:
        why = "is the disk full, or the folder read-only?"
        return f"the rank could not write its events ({why}) and ended with exit code {code}"
    return f"the rank ended with exit code {code} without having finished"


def _log_tail(run_directory: Path, rank: int) -> str:
    return log_tail(rank_log(run_directory, rank)) or log_tail(launcher_log(run_directory))
