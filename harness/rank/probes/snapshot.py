"""A snapshot of the CUDA caching allocator over the probed steps, for https://pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path

import torch

LONGEST_HISTORY = 200_000
"""Allocations and frees that torch remembers, oldest dropped first."""


class Snapshot:
    """Records every allocation with its stack between `start` and `write`; CUDA only."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._recording = False

    def start(self) -> None:
        if not self._recording:
            torch.cuda.memory._record_memory_history(max_entries=LONGEST_HISTORY)
            self._recording = True

    def write(self) -> None:
        """Write the file and stop recording; does nothing before `start`."""
        if self._recording:
            torch.cuda.memory._dump_snapshot(str(self.file))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False
