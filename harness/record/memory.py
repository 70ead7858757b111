"""Memory of one rank."""

from __future__ import annotations

from typing import Literal

from harness.record.part import Part

Moment = Literal[
    "after_setup",
    "after_forward",
    "after_backward",
    "after_step",
    "during_evaluation",
    "during_checkpoint",
    "during_checkpoint_load",
]


class MemoryPart(Part):
    """Memory of one rank at one moment of a probed step."""

    step: int
    """Number of the probed step."""
    moment: Moment
    """When it was read."""
    allocated_bytes: int | None
    """What torch's allocator serves now."""
    peak_bytes: int | None
    """The most it served since the moment before."""
    kinds: dict[str, int] | None
    """Live bytes by kind, each storage once; None: the backend does not say. 'activations': what the
    forward pass left behind; 'data': the samples in memory; 'other': the allocator's rest."""
    outside_kinds: dict[str, int] | None = None
    """Live bytes by kind that the allocator above did not serve: on the host beside a CUDA device, mapped
    from a file, or allocated before counting began. Not in `kinds`."""
    file_bytes: int | None = None
    """Size of the files into which the rank's states are swapped; None: nothing is swapped."""
    gathered_peak_bytes: int | None = None
    """Most gathered weights at the end of a module's forward pass since the moment before."""
    gathered_least_bytes: int | None = None
    """Least gathered weights at such an end: what is gathered whatever computes."""
    reserved_bytes: int | None = None
    """CUDA: what the caching allocator holds of the device; above `allocated_bytes` it is fragmentation."""
    num_alloc_retries: int | None = None
    """CUDA: how often the caching allocator so far found no free block, emptied its cache and tried again;
    each of these stops the device."""
    device_used_bytes: int | None = None
    """CUDA: the device memory of this process as the driver counts it (NVML), context and NCCL included."""
    device_used_unknown: str | None = None
    """CUDA: why the driver's figure is not there."""
    host_resident_bytes: int | None = None
    """Resident set of the process, libraries included."""
    pinned_bytes: int | None = None
    """CUDA: page-locked host memory that torch allocated."""


class SetupMemoryPart(Part):
    """Host memory of one rank while it is set up: resident and backed by no file, libraries included."""

    before_bytes: int
    """Before the model is built."""
    engine_peak_bytes: int
    """Most until the engine is ready: the model built, sharded and filled with its initial weights."""
    engine_bytes: int
    """When it is ready."""
    digest_peak_bytes: int
    """Most while the initial weights are gathered and digested."""
