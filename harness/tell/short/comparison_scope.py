"""The cells that the short report compares: of one job, on one number of ranks, under the same conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from harness.backends.registry import PLANTED
from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, SPEED
from harness.judge.rows import BASE, CellRuns, Place, place_to_compare
from harness.judge.statistics import Ranking

Read = Callable[[CellRuns], float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class ComparisonScope:
    """Cells of one place that succeeded, the reference left out where others ran beside it."""

    comparison: Comparison
    place: Place

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.place[1]

    @cached_property
    def groups(self) -> list[CellRuns]:
        """Those that agree with the reference, or cannot be judged; never one that is wrong on purpose."""
        found = [
            group
            for group in self.comparison.groups
            if group.place == self.place
            and group.has_result
            and group.parity != "diverged"
            and group.record.backend.name not in PLANTED
        ]
        return [group for group in found if not group.is_reference] or found

    @cached_property
    def base(self) -> CellRuns | None:
        """DDP, which the others are related to; None where it did not run."""
        return next((group for group in self.groups if group.backend == BASE), None)

    @property
    def order(self) -> Ranking | None:
        """The order by speed, as far as the runs support one; None where nothing but the reference ran."""
        return self.comparison.rankings.get(self.place)

    @cached_property
    def timed(self) -> dict[str, CellRuns]:
        """The cells that are in the order, by label; the reference where it ran alone."""
        here = [g for g in self.comparison.groups if g.place == self.place and g.has_result]
        names = [group.label for group in self.groups] if self.order is None else self.order.names
        return {group.label: group for group in here if group.label in names and group.values(SPEED)}

    @property
    def is_alone(self) -> bool:
        """Whether its only cell ran under other conditions than all others on as many ranks."""
        here = [g for g in self.comparison.groups if g.record.job_id == self.place[0]]
        return len(self.groups) == 1 and any(
            g.world_size == self.size and g.place != self.place and g.step_seconds for g in here
        )

    @property
    def on_cpu(self) -> bool:
        """Whether speeds say nothing of GPUs."""
        return any(group.record.world.device == "cpu" or group.record.on_stub for group in self.groups)

    def figures(self, read: Callable[[CellRuns], float | None]) -> dict[str, float]:
        """A figure of each cell that has it, by label, least first."""
        found = {group.label: value for group in self.groups if (value := read(group)) is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def comparison_scope(comparison: Comparison) -> ComparisonScope | None:
    """Where most backends were compared; None where nothing succeeded."""
    comparable = comparison.comparable
    place = place_to_compare(comparable.groups) or _any_place(comparable)
    return None if place is None else ComparisonScope(comparable, place)


def peak(group: CellRuns) -> float | None:
    """Largest allocator peak of any rank, in bytes."""
    return max(group.rank_peaks, default=None)


def sent_once(group: CellRuns) -> float | None:
    """Ring bytes that a rank sends per step, as counted."""
    return group.median(SENT)


def states(group: CellRuns) -> float | None:
    """Bytes of model states of the rank that holds most."""
    return group.median("model_state_bytes")


def memory_to_state(where: ComparisonScope) -> Read:
    """The peak, or of CPU ranks, whose peaks do not carry over, the model states."""
    return states if where.on_cpu else peak


def bytes_frontier(where: ComparisonScope) -> list[CellRuns]:
    """Cells in rising traffic and falling peaks: each needs less memory than all that send no more.

    Both figures are counts, which other machines share; of equal cells the first of the comparison is kept.
    """
    known = [
        (rounded(sent), rounded(most), number, group)
        for number, group in enumerate(where.groups)
        if (sent := sent_once(group)) is not None and (most := peak(group)) is not None
    ]
    return falling((group, most) for _, most, _, group in sorted(known, key=lambda part: part[:3]))


def falling(cells: Iterable[tuple[T, float]], least_step: float = 0.0) -> list[T]:
    """Those that need less than each before them, by this share at least; `cells`: with their memory."""
    found: list[T] = []
    least: float | None = None
    for cell, most in cells:
        if least is None or most < least * (1 - least_step):
            found.append(cell)
            least = most
    return found


def rounded(value: float, digits: int = 3) -> float:
    """As it is shown, so that figures that read alike are alike."""
    return float(f"{value:.{digits}g}")


def _any_place(comparison: Comparison) -> Place | None:
    """The largest number of ranks of runs that were not timed."""
    known = [group for group in comparison.groups if group.has_result]
    return max(known, key=lambda group: group.world_size).place if known else None
