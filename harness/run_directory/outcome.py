"""How the processes of a run ended, as a launcher or Slurm sees it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from harness.record import Status


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
    stopped: Literal["timeout", "interrupted"] | None = None
    verdict: Verdict | None = None
    """Counts more than what the ranks say, unless all of them finished."""


def signal_name(code: int) -> str:
    """'SIGKILL' for exit code -9 of a process."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
