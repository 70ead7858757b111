"""One record as a comparison shows it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.compare.cell import Cell
from harness.record import Record


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A record under its label; equal to itself only."""

    record: Record
    label: str
    """The backend with its options, and in brackets what distinguishes it from others of its job and size."""

    @property
    def cell(self) -> Cell:
        """The label and the number of ranks."""
        return Cell(self.label, self.record.world.world_size)
