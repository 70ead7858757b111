"""Saves one checkpoint of a run while its memory and its collectives are recorded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.backends.base import Engine, World
from harness.worker.probes import Probes


@dataclass(frozen=True, kw_only=True)
class CheckpointProbe:
    """Called once, between two steps, while the allocator still counts."""

    folder: Path
    """Where the library writes; the same path on every rank."""
    keep: bool
    world: World

    def save(self, engine: Engine, probes: Probes, steps_taken: int) -> None:
        """Save through `engine`, then delete the files unless they are to be kept; a collective.

        Only the saving is recorded. Raises what the library raises where it cannot save.
        """
        with probes.memory_of("during_checkpoint", steps_taken), probes.counting("checkpoint"):
            engine.save(self.folder)
        dist.barrier()  # no rank deletes what another still writes
        if not self.keep and self.world.local_rank == 0:
            # Nodes that share the folder delete it side by side.
            shutil.rmtree(self.folder, ignore_errors=True)
