"""What a backend raises where its library cannot run a job."""

from __future__ import annotations


class Unsupported(Exception):
    """The library cannot run this job here; the message says why, for the report."""
