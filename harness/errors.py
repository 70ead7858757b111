"""Errors that a user can act on: one line that says what was given, what is allowed, what to do."""

from __future__ import annotations


class HarnessError(Exception):
    """Shown as one line; the command line exits with 1."""


class JobError(HarnessError):
    """The job itself is at fault, so no backend could run it."""
