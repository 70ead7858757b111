"""Errors that a user can act on: one line that says what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarnessError(Exception):
    """Shown as one line; the command line exits with 1."""


class JobError(HarnessError):
    """The job itself is at fault, so no backend could run it."""


def choices(given: str, allowed: Iterable[str]) -> str:
    """List what is allowed and add the closest match to what was given."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1)
    listed = ", ".join(names) or "nothing"
    return f"{listed}. Did you mean '{close[0]}'?" if close else listed
