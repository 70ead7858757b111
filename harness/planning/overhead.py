"""What lies on a device beside what torch's allocator serves."""

from __future__ import annotations

from collections.abc import Iterator

from harness.planning.scenario import Scenario
from harness.planning.term import MemoryTerm

NCCL_CHANNEL_BYTES = 4 * 2**20
"""NCCL_BUFFSIZE, of one channel to one peer (NCCL 2.2x, user guide, environment variables)."""
NCCL_CHANNELS = 16
"""As on NVLink systems; between 2 and 32 by topology."""
CONNECTIONS = 2
"""A ring: one peer that sends and one that receives."""


def device_overhead(scenario: Scenario) -> Iterator[MemoryTerm]:
    """CUDA context, NCCL's buffers and fragmentation; nothing on a CPU. Estimates, unlike the peak."""
    if scenario.torch_device == "cpu":
        return
    if scenario.device is not None:
        yield MemoryTerm(
            kind="buffers", name="context", bytes=scenario.device.context_bytes, formula="of the device",
            source=scenario.device.source,
        )  # fmt: skip
    if scenario.world_size > 1 and scenario.transport == "nccl":
        communicators = 2 if scenario.strategy.facts.has_replicas else 1
        yield MemoryTerm(
            kind="communication", name="NCCL's buffers",
            bytes=communicators * NCCL_CHANNELS * CONNECTIONS * NCCL_CHANNEL_BYTES,
            formula="communicators x 16 channels x 2 x 4 MiB; 2 to 32 channels by topology",
            source="NCCL user guide, NCCL_BUFFSIZE",
        )  # fmt: skip
