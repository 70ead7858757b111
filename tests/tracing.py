"""Traces activations in the process of the tests, where torch is loaded once and not for each model."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import pytest

from harness.errors import HarnessError
from harness.plan import profiles

ONE, SEVERAL = profiles._trace, profiles._trace_all
"""As a person's command traces, in new processes: tests/harness/plan/test_profiles.py holds both."""
_tracing = Lock()


def trace_here(patch: pytest.MonkeyPatch) -> None:
    """Let plans trace in this process while the patch lasts."""
    patch.setattr(profiles, "_trace", _one)
    patch.setattr(profiles, "_trace_all", _several)


def _one(request: str) -> str:
    from harness.rank.probes.activation_trace import profile_text

    with _tracing:
        return profile_text(request)


def _several(_: int, requests: Sequence[str], each: Callable[[], object]) -> None:
    for request in requests:
        with suppress(HarnessError):  # it comes with the profile that is asked for
            profiles._keep(request, _one(request))
        each()
