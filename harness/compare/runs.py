"""The rows of a comparison and their cells: what findings look at."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row


class Runs:
    """Rows in the order in which they are shown."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    @cached_property
    def groups(self) -> list[Repeats]:
        """The rows by cell: the repeats of one job, backend and world size together."""
        return group_repeats(self.rows)
