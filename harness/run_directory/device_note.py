"""What a watched rank notes of its GPU besides its events: for `harness doctor --gpu`."""

from __future__ import annotations

from pathlib import Path

from harness.record import Part

WATCH = "HARNESS_WATCH_DEVICE"
"""Variable of ranks that note this; any value."""


class DeviceNote(Part):
    """One rank's."""

    rank: int
    index: int
    """Of the device among those that the rank sees."""
    uuid: str
    name: str
    event_step_seconds: list[float]
    """Of each step, between CUDA events recorded where the loop starts and stops its clock."""
    synchronisations: list[int]
    """Of each step, how often the device was synchronised within forward and backward passes."""
    micro_steps: int
    """Forward passes of each step."""
    gradient_bytes: int
    """Of the gradients whose norm was taken."""
    norm_peak_bytes: int
    """The most that the allocator served while it was taken, beyond those gradients."""


def device_note(run_directory: Path, rank: int) -> Path:
    """Where a rank's note is."""
    return run_directory / f"rank-{rank:05d}.device.json"
