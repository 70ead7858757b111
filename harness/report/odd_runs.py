"""Leaves out the runs of which nothing can be shown, so that one odd record does not cost a whole report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.errors import HarnessError
from harness.report.report import Run
from harness.safe_text import described

Trial = Callable[[Sequence[Run]], object]
"""Computes what will be shown of these runs, and writes nothing."""


def without_odd_runs(runs: Sequence[Run], trial: Trial) -> tuple[list[Run], list[str]]:
    """The runs that can be shown together, and why each of the others cannot.

    Each is tried by itself, then by leaving it out. Raises HarnessError if neither helps.
    """
    problem = _problem(runs, trial)
    if problem is None:
        return list(runs), []
    alone = {path: why for path, record in runs if (why := _problem([(path, record)], trial)) is not None}
    sound = [run for run in runs if run[0] not in alone]
    if not alone or (sound and _problem(sound, trial) is not None):
        path = next((p for p, _ in sound if _problem([r for r in sound if r[0] != p], trial) is None), None)
        if path is None:
            raise HarnessError(f"these records cannot be shown together: {problem}")
        alone[path] = problem
        sound = [run for run in sound if run[0] != path]
    if not sound:
        raise HarnessError(f"no record can be shown: {problem}")
    return sound, [f"record {path} is valid but cannot be shown: {why}" for path, why in alone.items()]


def _problem(runs: Sequence[Run], trial: Trial) -> str | None:
    """Why these runs cannot be shown; None: they can."""
    try:
        trial(runs)
    except (HarnessError, OSError):
        raise
    except Exception as error:  # an odd value may break any figure
        return f"{type(error).__name__}: {described(error)}"
    return None
