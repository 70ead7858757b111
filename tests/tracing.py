"""Traces activations in the process of the tests, where torch is loaded once and not for each model."""

from threading import Lock

import pytest

from harness.plan.profiles import Tracer

ONE = Tracer.__call__
"""As a person's command traces, in a new process: tests/harness/plan/test_profiles.py holds both."""
_tracing = Lock()


def trace_here(patch: pytest.MonkeyPatch) -> None:
    """Let plans trace in this process while the patch lasts."""
    patch.setattr(Tracer, "__call__", lambda _, request: _here(request))


def _here(request: str) -> str:
    from harness.rank.probes.activation_trace import profile_text

    with _tracing:
        return profile_text(request)
