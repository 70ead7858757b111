"""Imported by the ranks: notes in the stub's log when the harness counts collectives, and what torch's
statistics say of memory where the harness reads it."""

import ctypes
import os
from typing import Any

import torch

from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import MemoryProbe

COUNTING, NOT_COUNTING = "counting", "not counting"
MEMORY = "memory of torch.cuda.memory_stats, peak and allocated"

_start, _stop, _record = CommunicationCounter.start, CommunicationCounter.stop, MemoryProbe.record


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


def _marked_record(probe: MemoryProbe, *moment: Any) -> None:
    if "CUDA_STUB_LOG" in os.environ:
        stats = torch.cuda.memory_stats()
        _mark(f"{MEMORY}: {stats['allocated_bytes.all.peak']} {stats['allocated_bytes.all.current']}")
    _record(probe, *moment)


CommunicationCounter.start = _marked_start  # type: ignore[method-assign]
CommunicationCounter.stop = _marked_stop  # type: ignore[method-assign]
MemoryProbe.record = _marked_record  # type: ignore[method-assign]
