"""Peaks of records against the history that torch's allocator keeps itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.gpu_stub.machine import Machine
from tests.representatives import first

ALLOCATION_BYTES = 512
"""The caching allocator rounds up to these; its history lists what was asked for."""


@pytest.mark.parametrize("label", first(["fsdp"], ["zero3", "fsdp"]))
def test_allocator_peaks_are_those_of_its_own_history(label: str, machine: Machine) -> None:
    """Peaks of the record against the sum over every allocation that torch's snapshot lists."""
    record = machine.run(label, 2, ["measure.memory_snapshot=true"])
    assert record.status == "ok", record.error
    for part in record.ranks:
        peaks = [row.peak_bytes for row in part.memory if row.peak_bytes is not None]
        (file,) = machine.run_directory(record).glob(f"*snapshot*{part.rank:05}*")
        snapshot = pickle.loads(file.read_bytes())
        assert max(peaks) == largest_allocated_bytes(snapshot, part.rank)


def largest_allocated_bytes(snapshot: dict[str, Any], device: int) -> int:
    """From what is allocated at the end, back through the history."""
    held = sum(
        block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    most = held
    for event in reversed(snapshot["device_traces"][device]):
        size = -(-event["size"] // ALLOCATION_BYTES) * ALLOCATION_BYTES
        held += {"alloc": -size, "free_completed": size}.get(event["action"], 0)
        most = max(most, held)
    return int(most)
