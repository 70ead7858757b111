"""How a run ended, from its ranks' events and the way that its processes ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.record import ErrorPart, Status, StepPart
from harness.run_directory.outcome import Outcome, signal_name
from harness.run_directory.rank_events import RankEvents
from harness.run_directory.request import launcher_log, rank_log
from harness.run_directory.side_files import log_tail


def status_of(
    run_directory: Path, events: Mapping[int, RankEvents], steps: list[StepPart], outcome: Outcome
) -> tuple[Status, ErrorPart | None]:
    """The status of a run, and why it has no complete result; `steps` are those that every rank finished."""
    finished = all(of_rank.done for of_rank in events.values())
    if outcome.verdict is not None and not finished:
        return outcome.verdict.status, ErrorPart(
            kind=outcome.verdict.kind,
            message=f"{outcome.verdict.cause} after {len(steps)} steps",
            log_tail=_log_tail(run_directory, 0),
        )
    killed = [(rank, code) for rank, code in outcome.exit_codes.items() if code is not None and code < 0]
    if killed:
        # The others fail because this one is gone, and may say so before anybody sees it die.
        return "failed", _exit_error(run_directory, *killed[0])
    failures = [(event.at, rank, event) for rank, of_rank in events.items() for event in of_rank.failures]
    if failures:
        # The first to fail is the cause; the others fail because it is gone.
        _, rank, event = min(failures, key=lambda failure: failure[:2])
        return event.status, ErrorPart(
            kind=event.error_kind,
            message=event.message,
            rank=rank,
            log_tail=_log_tail(run_directory, rank),
        )
    if any(of_rank.reasons for of_rank in events.values()):
        return "unsupported", None
    if finished:
        lost = [step.step for step in steps if step.loss is None]
        if lost:
            return "diverged", ErrorPart(
                kind="NotFinite", message=f"the loss is not finite from step {lost[0]} on"
            )
        return "ok", None
    if outcome.stopped == "timeout":
        return "timeout", ErrorPart(
            kind="Timeout", message=f"stopped after {len(steps)} steps: runtime.timeout_seconds passed"
        )
    if outcome.stopped == "interrupted":
        return "failed", ErrorPart(
            kind="Interrupted", message=f"interrupted by the user after {len(steps)} steps"
        )
    rank, code = next(
        ((rank, code) for rank, code in outcome.exit_codes.items() if code not in (0, None)),
        (0, outcome.exit_codes.get(0)),
    )
    return "failed", _exit_error(run_directory, rank, code)


def _exit_error(run_directory: Path, rank: int, code: int | None) -> ErrorPart:
    return ErrorPart(
        kind="Exit", message=_exit_message(code), rank=rank, log_tail=_log_tail(run_directory, rank)
    )


def _exit_message(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (the kernel's out-of-memory killer ends processes so)" if code == -9 else ""
        return f"the rank was killed by {signal_name(code)}{hint}"
    return f"the rank ended with exit code {code} without having finished"


def _log_tail(run_directory: Path, rank: int) -> str:
    return log_tail(rank_log(run_directory, rank)) or log_tail(launcher_log(run_directory))
