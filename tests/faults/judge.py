"""Whether the record of a run tells the truth about the fault that was planted in it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.record import ErrorPart, Record
from tests.faults.scene import Seen

MISMATCH = "CollectiveMismatch"
STUCK = "Stuck"
IN_THE_FAULT = "faults/plants.py"
"""In the stack of a rank that sleeps, or is in a collective, because of the fault."""
TOLD = ("harness: ", "run '")
"""Begins the one line of a command that could not go on, or of a run that has another folder now."""

Check = Callable[[Seen, Record, ErrorPart], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a truthful record says of one kind of fault."""

    status: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    """None: any."""
    message: str = ""
    """A regular expression."""
    exit_code: int | None = None
    names_rank: bool = True
    """Whether it must name the rank."""
    names_place: bool = True
    """Whether it must name step and phase of the fault."""
    check: Check | None = None
    told: bool = False
    """Whether the command must say what it could not write."""


def untruths(seen: Seen) -> list[str]:
    """What the record lacks or says wrongly, in words; empty: it is truthful."""
    if seen.happened is None:
        return ["the fault did not happen"]
    if seen.record is None:
        return ["no record"]
    if any(call.code is None for call in seen.calls):
        return ["the command hung"]
    for call in seen.calls:
        if "Traceback" in call.errors:
            return [f"the command printed a traceback: {call.errors[-300:]!r}"]
    expected = EXPECTED[seen.injection.kind]
    lines = [line for call in seen.calls for line in call.errors.splitlines()]
    if expected.told and not any(line.startswith(TOLD) and "cannot be written" in line for line in lines):
        return ["the command did not say what it could not write"]
    error = seen.record.error
    if error is None:
        return [] if "ok" in expected.status else [f"status {seen.record.status} without an error"]
    return list(_wrong(seen, seen.record, error, expected))


def _wrong(seen: Seen, record: Record, error: ErrorPart, expected: Expected) -> Iterator[str]:
    assert seen.happened is not None
    if record.status not in expected.status:
        yield f"status {record.status}"
    if expected.kinds and error.kind not in expected.kinds:
        yield f"kind {error.kind}"
    if not re.search(expected.message, error.message):
        yield f"message '{error.message}'"
    if expected.exit_code is not None and error.exit_code not in (expected.exit_code, None):
        yield f"exit code {error.exit_code}"
    if expected.names_rank and error.rank != seen.injection.rank:
        yield f"rank {error.rank}"
    place = (seen.happened["step"], seen.happened["phase"])
    if expected.names_place and (error.step, error.phase) != place:
        yield f"step {error.step}, phase {error.phase}"
    # Only who raises writes to its log for certain.
    if error.rank is not None and not error.log_tail and seen.injection.kind == "raise":
        yield "no log tail"
    if expected.check is not None:
        yield from expected.check(seen, record, error)


def _shows_all_ranks(seen: Seen, _: Record, error: ErrorPart) -> Iterator[str]:
    if [part.rank for part in error.ranks] != [0, 1]:
        yield f"shows ranks {[part.rank for part in error.ranks]}"


def _shows_who_stands_still(seen: Seen, record: Record, error: ErrorPart) -> Iterator[str]:
    """A rank that sleeps by its stack, one that was stopped by a note, and the stack of the other."""
    yield from _shows_all_ranks(seen, record, error)
    states = {part.rank: part for part in error.ranks}
    own, other = states.get(seen.injection.rank), states.get(1 - seen.injection.rank)
    is_stopped = seen.injection.kind == "stopped"
    if own is None or ("SIGSTOP" not in own.note if is_stopped else IN_THE_FAULT not in own.stack):
        yield "does not say that the rank was stopped" if is_stopped else "no stack of the rank that sleeps"
    if other is None or not other.stack:
        yield "no stack of the rank that waits"


def _shows_the_disagreement(seen: Seen, record: Record, error: ErrorPart) -> Iterator[str]:
    """A rank that waits shows its collective or its stack; one that aborted does so in the log."""
    yield from _shows_all_ranks(seen, record, error)
    if error.kind == STUCK and not all(part.stack for part in error.ranks):
        yield "no stacks"
    if error.kind == STUCK and not any(part.collective for part in error.ranks):
        yield "no collective"
    is_told = "Received data size doesn't match" in error.log_tail or " differ in " in error.message
    if error.kind == MISMATCH and not is_told:
        yield "neither the log nor the recorders show the mismatch"


def _rank(kind: str | tuple[str, ...], message: str = "", **more: object) -> Expected:
    kinds = (kind,) if isinstance(kind, str) else kind
    return Expected(status=("failed",), kinds=kinds, message=message, **more)  # type: ignore[arg-type]


_ENDED_OUTSIDE = {"names_rank": False, "names_place": False, "check": _shows_all_ranks}
_DISAGREE = Expected(
    status=("failed", "timeout"), kinds=(MISMATCH, STUCK), names_rank=False, names_place=False,
    message="ranks disagree|waits in|(is in another|differ in) collective", check=_shows_the_disagreement,
)  # fmt: skip
_NO_ROOM = "could not write its events|No space left"
_NOT_FINITE = Expected(status=("diverged",), kinds=("NotFinite",), message="not finite from step")

EXPECTED: dict[str, Expected] = {
    "raise": _rank("RuntimeError", "planted", exit_code=1),
    "host-memory": Expected(status=("oom",), kinds=("RuntimeError", "MemoryError"), message="memory"),
    "device-memory": Expected(status=("oom",), kinds=("OutOfMemoryError",), message="CUDA out of memory"),
    "nan-loss": _NOT_FINITE,
    "infinite-loss": _NOT_FINITE,
    "no-library": _rank(("ModuleNotFoundError", "ImportError"), "transformers", names_place=False),
    "exit-0": _rank("Exit", "exit code 0", exit_code=0),
    "exit-5": _rank("Exit", "exit code 5", exit_code=5),
    "terminated": _rank("Exit", "SIGTERM"),
    "killed": _rank("Exit", "SIGKILL", exit_code=-9),
    "sleep": Expected(status=("timeout",), kinds=(STUCK,), check=_shows_who_stands_still),
    "stopped": Expected(
        status=("timeout",), kinds=(STUCK,), message="SIGSTOP", check=_shows_who_stands_still
    ),
    "extra-collective": _DISAGREE,
    "other-collective": _DISAGREE,
    "full-disk": Expected(
        status=("ok", "failed"), message=_NO_ROOM, names_rank=False, names_place=False, told=True
    ),
    "read-only": Expected(
        status=("ok", "failed"), message="Permission denied|could not write", names_rank=False,
        names_place=False, told=True,
    ),
    "network": Expected(
        status=("timeout",), kinds=(STUCK,), message="waits in", **_ENDED_OUTSIDE,  # type: ignore[arg-type]
    ),
    "ctrl-c": _rank("Interrupted", "after [0-9]+ steps", **_ENDED_OUTSIDE),
    "launcher-terminated": _rank("Interrupted", "after [0-9]+ steps", **_ENDED_OUTSIDE),
    "launcher-killed": _rank("LauncherLost", "after [0-9]+ steps", **_ENDED_OUTSIDE),
}  # fmt: skip
