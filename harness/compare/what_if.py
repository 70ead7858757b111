"""Closed forms of a measured cell on other numbers of ranks or micro-steps: model states and traffic."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from harness.compare.volume import sent_per_step
from harness.forms import families
from harness.forms.workload import Window, Workload
from harness.record import Record
from harness.record.workload import of_record


def states_on(record: Record, world_size: int) -> int | None:
    """Bytes of model states of the rank that would hold most on so many ranks; None: no closed form.

    Hybrid strategies and meshes have none: their groups may stay as they are or grow.
    """
    workload = _built_in(record)
    if workload is None or workload.strategy.facts.has_replicas or record.world.dimensions:
        return None
    other = replace(workload, world_size=world_size, shard_size=world_size, ranks_per_node=None)
    return max(
        families.model_states(replace(other, rank=rank)).model_state_bytes for rank in range(world_size)
    )


def sent_with(record: Record, accumulation_steps: int) -> float | None:
    """Ring bytes that a rank sends in an ordinary step of so many micro-steps, mean over the ranks; None: no
    closed form."""
    workload = _built_in(record)
    if workload is None:
        return None
    other = replace(workload, accumulation_steps=accumulation_steps, window=Window())
    ranks = record.world.world_size if record.world.dimensions else 1  # of which one stands for all
    sent = [
        sent_per_step(of_rank, families.collectives(of_rank))
        for of_rank in (replace(other, rank=rank) for rank in range(ranks))
    ]
    return None if None in sent else fmean(part for part in sent if part is not None)


def _built_in(record: Record) -> Workload | None:
    """The workload of a built-in backend; a third party's own forms hold for its run alone."""
    if record.backend.own_forms is not None or record.backend.effective is None:
        return None
    workload = of_record(record)
    if workload is None or workload.strategy.family not in families.FAMILIES:
        return None
    return workload
