"""What hand-outs ask of one run, read from its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.record import Record

NO_LOSS: tuple[float, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A cell of a lab: its repeats summed up as everywhere, and a few figures that only hand-outs know."""

    group: Repeats

    @property
    def record(self) -> Record:
        return self.group.record

    @property
    def ranks(self) -> int:
        return self.group.world_size

    @property
    def is_baseline(self) -> bool:
        """Whether it is one process without any strategy."""
        return self.group.is_reference

    def figure(self, key: str) -> float | None:
        """A metric of the cell by its key."""
        return self.figures[key]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        return self.group.figures

    @property
    def runtime_seconds(self) -> float | None:
        """Mean timed step times the steps of the job: without set-up and evaluations."""
        step = self.figure("step_seconds")
        return None if step is None else step * len(self.record.steps)

    @property
    def train_loss(self) -> float | None:
        """Mean over all steps, as `train_loss` of Transformers' Trainer, in nats."""
        losses = [step.loss for step in self.record.steps if step.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def steps_per_epoch(self) -> int | None:
        batch = self.record.job.training.global_batch_size
        return self.record.data.training_samples // batch if self.record.data and batch else None

    def evaluation_loss(self, epoch: int) -> float | None:
        """Of the last evaluation up to the end of an epoch, counted from 1; None if none was in it."""
        each = self.steps_per_epoch
        if not each:
            return None
        found = [part for part in self.record.eval if each * (epoch - 1) < part.step <= each * epoch]
        return found[-1].loss if found else None

    @property
    def epochs(self) -> int:
        """Epochs that were begun."""
        each = self.steps_per_epoch
        return -(-len(self.record.steps) // each) if each else 0


def baseline(cells: Sequence[Facts]) -> Facts | None:
    """One process on the job of one rank: its batch is not that of more ranks."""
    alone = {c.record.job_id for c in cells if c.ranks == 1 and not c.is_baseline}
    found = [c for c in cells if c.is_baseline]
    return next((c for c in found if c.record.job_id in alone), found[0] if len(found) == 1 else None)


def cells(records: Sequence[Record]) -> list[Facts]:
    """The cells of a lab that ended well, by number of ranks."""
    groups = Comparison(records).groups
    return sorted(
        (Facts(group) for group in groups if group.record.status == "ok"), key=lambda cell: cell.ranks
    )


def strategies(found: Sequence[Facts]) -> list[Facts]:
    """The cells that are no reference."""
    return [cell for cell in found if not cell.is_baseline]


def on_cpu(records: Sequence[Record]) -> bool:
    """Whether what a hand-out calls GPU memory was host memory."""
    return any(record.world.device == "cpu" for record in records)


def remarks(records: Sequence[Record]) -> list[str]:
    """What holds for every table of these records."""
    found = []
    if on_cpu(records):
        found.append(
            "CPU ranks: 'GPU memory' is what torch allocates in host memory; speeds say nothing of GPUs."
        )
    for record in records:
        if record.status != "ok":
            reason = "; ".join(record.reasons) or (record.error.message if record.error else record.status)
            where = f"{record.backend.label} on {record.world.world_size}"
            found.append(f"{where}: {record.status}: {reason.splitlines()[0] if reason else ''}")
    return list(dict.fromkeys(found))
