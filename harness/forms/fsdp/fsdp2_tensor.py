"""FSDP2 of torch 2.13 along 'shard' of a model whose layers are cut along 'tensor'."""

from __future__ import annotations

from dataclasses import replace

from harness.forms import tensor
from harness.forms.fsdp import fsdp2
from harness.forms.part import local_workload
from harness.forms.terms import NORM, Collective, ModelStates, Volume, over_steps
from harness.forms.workload import Workload


def model_states(workload: Workload) -> ModelStates:
    """Those of FSDP2 with the model that one rank along 'tensor' holds."""
    return fsdp2.model_states(local_workload(workload))


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of what the rank holds of each parameter, by group."""
    return fsdp2.updated_tensors(local_workload(workload))


def collectives(workload: Workload) -> Volume:
    """FSDP2's of that model along 'shard', and the activations along 'tensor'."""
    inner = fsdp2.collectives(local_workload(workload))
    if workload.sequence_length is None:
        return Volume(unknown="the length of samples is not known, and so the size of activations")

    def step(workload: Workload, _: int) -> list[Collective]:
        return [*tensor.activations(workload, workload.accumulation_steps), tensor.norm("world")]

    along_shard = [replace(part, role="shard") for part in inner.collectives if part.term != NORM]
    found = [*along_shard, *over_steps(workload, step)]
    return Volume(
        collectives=tuple(found),
        remarks=inner.remarks,
        unknown=inner.unknown or tensor.why_unknown(workload),
    )
