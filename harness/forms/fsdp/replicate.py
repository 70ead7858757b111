"""`replicate` of torch 2.13 (`_composable/replicate_with_fsdp.py`): FSDP2's units, each rank a replica."""

from __future__ import annotations

from harness.forms.fsdp.fsdp2 import model_states, updated_tensors
from harness.forms.fsdp.units import all_reduced, reduction_remarks
from harness.forms.layout import elements
from harness.forms.terms import Volume
from harness.forms.workload import Workload

__all__ = ["collectives", "model_states", "updated_tensors"]


def collectives(workload: Workload) -> Volume:
    """Gradients of each unit all-reduced whole, in the last micro-step or in each.

    `FSDPParamGroup.unshard` gathers nothing in a group of one rank and `foreach_reduce`
    (_fsdp_collectives.py) scatters nothing there; every rank has all of the norm.
    """
    layout = workload.layout
    counts = [elements(list(filter(layout.is_reached, tensors))) for _, tensors in layout.units()]
    sizes = [(count, count) for count in counts if count]
    found = all_reduced(workload, sizes) * len(workload.steps)
    return Volume(collectives=tuple(found), remarks=tuple(reduction_remarks(workload)))
