"""Moves batches to the device without waiting for it."""

from __future__ import annotations

from harness.backends.base import Batch


def to_device(batch: Batch, device: str) -> Batch:
    """The batch on `device`, 'cpu' or 'cuda', queued behind what the device still has to do.

    From pageable memory the copy would first wait for all of that, and the time of fetching data would hold
    the device's own. The caching host allocator keeps a pinned copy until the device has read it.
    """
    if device == "cpu":
        return batch
    return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
