"""A backend on a number of ranks, and how one or many of them are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.judge.wording import listed, ranks
from harness.record import Record

Backends = tuple[str, ...]
"""Labels of several backends."""


class CellName(NamedTuple):
    """A backend, under the label of its runs, on a number of ranks."""

    label: str
    world_size: int

    @classmethod
    def of(cls, record: Record) -> CellName:
        """The cell that a run belongs to."""
        return cls(record.backend.label, record.world.world_size)

    def __str__(self) -> str:
        """'ddp on 2 ranks'."""
        return f"{self.label} on {ranks(self.world_size)}"

    @property
    def key(self) -> str:
        """'ddp on 2': its key in `compare --json`."""
        return f"{self.label} on {self.world_size}"


def name_cells(subjects: Sequence[CellName | Backends], most: int | None = None) -> str:
    """Several cells in few words: 'zero1 and zero2 on 2 and 4 ranks; fsdp-hybrid on 4 ranks'.

    Names at most `most` backends on the same numbers of ranks, or all of them where it is None. Lists of
    backends come first.
    """
    sizes: dict[str, set[int]] = {}
    others: list[str] = []
    for subject in subjects:
        if isinstance(subject, CellName):
            sizes.setdefault(subject.label, set()).add(subject.world_size)
        elif (names := listed(subject)) not in others:
            others.append(names)
    alike: dict[tuple[int, ...], list[str]] = {}
    for label, of_label in sizes.items():
        alike.setdefault(tuple(sorted(of_label)), []).append(label)
    cells = [f"{listed(labels, most or len(labels))} on {ranks(*on)}" for on, labels in alike.items()]
    return "; ".join([*([listed(others, most or len(others))] if others else []), *cells])
