"""The expected volume by name of backend."""

from __future__ import annotations

from collections.abc import Callable

from harness.theory.expected.checkpoint import with_checkpoint
from harness.theory.expected.ddp import ddp_volume
from harness.theory.expected.fsdp1 import fsdp1_kept_volume, fsdp1_no_shard_volume, fsdp1_volume
from harness.theory.expected.fsdp2 import fsdp2_kept_volume, fsdp2_volume
from harness.theory.expected.setting import Setting, Volume
from harness.theory.expected.zero import zero0_volume, zero1_volume, zero2_volume
from harness.theory.expected.zero3 import zero3_volume


def nothing(setting: Setting) -> Volume:
    """One process talks to nobody."""
    return Volume()


VOLUMES: dict[str, Callable[[Setting], Volume]] = {
    "single": nothing,
    "ddp": ddp_volume,
    "zero0": zero0_volume,
    "zero1": zero1_volume,
    "zero2": zero2_volume,
    "zero3": zero3_volume,
    "fsdp": fsdp2_volume,
    "fsdp-grad-op": fsdp2_kept_volume,
    "fsdp-hybrid": fsdp2_volume,
    "fsdp1": fsdp1_volume,
    "fsdp1-grad-op": fsdp1_kept_volume,
    "fsdp1-no-shard": fsdp1_no_shard_volume,
    "fsdp1-hybrid": fsdp1_volume,
    # Accelerate hands the same configuration to the same library, and adds no collective of its own.
    "accelerate-ddp": ddp_volume,
    "accelerate-zero1": zero1_volume,
    "accelerate-zero2": zero2_volume,
    "accelerate-zero3": zero3_volume,
    # Not run yet: they need an accelerator.
    "accelerate-fsdp": fsdp2_volume,
    "accelerate-fsdp1": fsdp1_volume,
}


def expected_volume(backend: str, setting: Setting) -> Volume | None:
    """What a built-in backend is expected to communicate; None for one that is not known here."""
    derive = VOLUMES.get(backend)
    if derive is None:
        return None
    volume = derive(setting)
    return with_checkpoint(backend, setting, volume) if setting.checkpoint else volume
