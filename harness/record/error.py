"""Why a run has no result, and where its ranks were."""

from __future__ import annotations

from harness.record.part import Part


class RankStatePart(Part):
    """Where one rank of a run was when the run had to be ended."""

    rank: int
    """Global rank."""
    step: int | None = None
    """None: it was not in a training step."""
    phase: str | None = None
    """None: the rank did not report one."""
    collective: str | None = None
    """The collective that it waited in; None: in none, or not known."""
    stack: str = ""
    """Python stacks of its threads; empty where it could not write them."""
    note: str = ""
    """What else is known: the process was stopped, or gone."""


class ErrorPart(Part):
    """Why a run has no result, or not a whole one."""

    kind: str
    """Exception, or how the run ended: 'Exit', 'Stuck', 'Timeout', 'Interrupted', 'LauncherLost' ..."""
    message: str
    """What happened, in one line."""
    rank: int | None = None
    """The rank at fault; None: not one rank, or not known."""
    exit_code: int | None = None
    """Of that rank's process; negative: killed by that signal. None: it did not end by itself."""
    step: int | None = None
    """The step that this rank was in; None: it was not in one."""
    phase: str | None = None
    """What this rank was doing: 'forward', 'setup', 'evaluation' ..."""
    log_tail: str = ""
    """End of the log of the rank at fault, 32 KB at most."""
    ranks: list[RankStatePart] = []
    """Of a run that had to be ended: where each rank was."""
