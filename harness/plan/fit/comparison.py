"""Micro-batches of a comparison in which every backend takes the largest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.backends import registry
from harness.backends.options import parts_of
from harness.errors import HarnessError
from harness.job.batch import BatchLayout
from harness.job.experiment import Experiment
from harness.launch.cells import Cell, make_cell
from harness.plan.devices.limits import MemoryLimits
from harness.plan.fit.search import divisors, largest_predicted
from harness.plan.job import data_bytes, planned_model, scenario_of
from harness.plan.prediction import Predictors, predict
from harness.plan.preflight import DOES_NOT_FIT, judged
from harness.record import Record


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """Cuts the global batch for each backend; what is computed stays the same.

    `facts`: by job id, what the check of the job returned (`rank.job_check`).
    """

    experiment: Experiment
    torch_device: str
    limits: MemoryLimits
    facts: Mapping[str, Mapping[str, Any]]
    by: Predictors

    def enlarged(self, cells: Iterable[Cell]) -> list[Cell]:
        """Cells with the largest micro-batch that is predicted to fit, the smallest if none is.

        The reference and its repetitions keep theirs, and so do backends of which nothing can be predicted.
        The limit of memory does not hold for the reference, without which nothing could be judged.
        """
        return [
            self._made(cell, cell.layout, limited=False)
            if _is_reference(cell)
            else self._cut(cell, self._largest(cell))
            for cell in cells
        ]

    def after(self, cells: Sequence[Cell], done: Mapping[str, Record]) -> list[Cell]:
        """Cells with the next smaller micro-batch where a run was out of memory."""
        return [
            self._smaller(cell) if cell.key in done and done[cell.key].status == "oom" else cell
            for cell in cells
        ]

    def _largest(self, cell: Cell) -> int:
        if self._fits(cell, cell.layout.micro_batch_size) is None:
            return cell.layout.micro_batch_size
        sizes = _sizes(cell)
        return largest_predicted(sizes, lambda size: bool(self._fits(cell, size))) or sizes[0]

    def _fits(self, cell: Cell, micro_batch_size: int) -> bool | None:
        """None: nothing can be predicted of this backend."""
        facts, other = self.facts[cell.job_id], self._cut(cell, micro_batch_size)
        try:
            model = planned_model(facts, cell.job)
            scenario = scenario_of(other, model, self.torch_device, device=self.limits.device)
            if scenario is None:
                return None
            needed = predict(scenario, self.by, timed=False).most_memory
            if needed is None:
                return None
            data = data_bytes(facts, cell.job, self.torch_device)
            return judged(scenario, needed, self.limits, data).verdict != DOES_NOT_FIT
        except HarnessError:
            return None

    def _smaller(self, cell: Cell) -> Cell:
        below = [size for size in _sizes(cell) if size < cell.layout.micro_batch_size]
        return self._cut(cell, below[-1]) if below and not _is_reference(cell) else cell

    def _cut(self, cell: Cell, micro_batch_size: int) -> Cell:
        if micro_batch_size == cell.layout.micro_batch_size:
            return cell
        total = cell.layout.global_batch_size
        layout = BatchLayout(
            global_batch_size=total,
            micro_batch_size=micro_batch_size,
            accumulation_steps=total // cell.data_size // micro_batch_size,
        )
        return self._made(cell, layout)

    def _made(self, cell: Cell, layout: BatchLayout, *, limited: bool = True) -> Cell:
        own = self.experiment.model_copy(update=dict(cell.job))  # whose kernels may be others
        return make_cell(
            own, cell.backend, cell.world_size, layout, cell.repeat, self.torch_device,
            nodes=cell.nodes, measure=cell.measure, limited=limited,
        )  # fmt: skip


def cut_lines(cells: Iterable[Cell]) -> list[str]:
    """What was chosen, a line for each backend and world."""
    chosen = {
        f"{cell.backend} on {cell.world_size} ranks: micro-batch {cell.layout.micro_batch_size}, "
        f"accumulation {cell.layout.accumulation_steps}"
        for cell in cells
        if not _is_reference(cell)
    }
    return sorted(chosen)


def require_limit(limits: MemoryLimits) -> None:
    """Raise HarnessError where nothing says how much memory a rank may use."""
    if limits.imposed_bytes is None and limits.device_bytes is None:
        raise HarnessError(
            "--batch largest needs a limit of memory for each rank: on the CPU give one with "
            "--set runtime.memory_limit=2GB"
        )


def _sizes(cell: Cell) -> list[int]:
    """A pipeline cuts micro-batches into parts; one that has no such size keeps the job's."""
    parts = parts_of(registry.parse(cell.backend)[1], cell.world_size)
    found = divisors(cell.layout.global_batch_size // cell.data_size)
    return [size for size in found if size % parts == 0] or [cell.layout.micro_batch_size]


def _is_reference(cell: Cell) -> bool:
    return registry.parse(cell.backend)[0].name == registry.REFERENCE
