"""How the processes of a run ended, as a launcher or Slurm sees it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.record import Status

EVENTS_LOST = 74
"""Exit code of a rank that could not write its events: EX_IOERR of sysexits.h."""
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that SIGTERM ended, without and with a last word."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a run was ended from outside."""

    status: Status
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
