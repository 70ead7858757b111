"""Imported by the ranks: marks in the stub's log which calls the harness's counter should have counted."""

from __future__ import annotations

import ctypes
import os

from harness.worker.communication import CommunicationCounter

COUNTING, NOT_COUNTING = "counting", "not counting"

_start, _stop = CommunicationCounter.start, CommunicationCounter.stop


def _mark(name: str) -> None:
    if "CUDA_STUB_LOG" in os.environ:
        ctypes.CDLL(None).cuda_stub_mark(name.encode())


def _marked_start(counter: CommunicationCounter) -> None:
    _start(counter)
    _mark(COUNTING)


def _marked_stop(counter: CommunicationCounter) -> None:
    if counter.at_work:
        _mark(NOT_COUNTING)
    _stop(counter)


CommunicationCounter.start = _marked_start  # type: ignore[method-assign]
CommunicationCounter.stop = _marked_stop  # type: ignore[method-assign]
