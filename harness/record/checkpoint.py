"""Checkpoints of a run: what saving and loading one cost, and the one that a run resumed from."""

from __future__ import annotations

from typing import Literal

from harness.record.part import Part

SavedFormat = Literal["native", "consolidated", "neutral"]


class CheckpointPart(Part):
    """Saving or loading one checkpoint, on one rank."""

    operation: Literal["save", "load"]
    """Which of the two."""
    format: SavedFormat
    """The library's own, the weights as Hugging Face reads them, or weights and optimizer states by name."""
    step: int
    """Steps taken before."""
    seconds: float
    """From a barrier to a barrier: that of the slowest rank."""
    file_bytes: int | None = None
    """Size of all files of the checkpoint; of rank 0 only."""
    host_before_bytes: int | None = None
    """Anonymous memory of the process before, libraries' files and mapped ones left out; None: not told."""
    host_peak_bytes: int | None = None
    """The most meanwhile, read every few milliseconds."""


class ResumedPart(Part):
    """The checkpoint that a run continued."""

    format: SavedFormat
    """As of `CheckpointPart`."""
    run_id: str
    """The run that saved it."""
    backend: str
    """That run's backend, with its options."""
    world_size: int
    """That run's ranks."""
    step: int
    """Steps taken when it was saved: the number of the first step of this run."""
    updates: int | None = None
    """Updates that the optimizer had made; None: the backend does not report them."""
    weights_digest: str | None = None
    """Digest of the master weights when it was saved; None: not taken."""
