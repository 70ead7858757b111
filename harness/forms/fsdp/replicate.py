"""`replicate` of torch 2.13 (`_composable/replicate_with_fsdp.py`): FSDP2's units, each rank a replica."""

from __future__ import annotations

from harness.forms.fsdp.fsdp2 import model_states, updated_tensors
from harness.forms.fsdp.units import reduce_dtype, reduction_remarks
from harness.forms.layout import elements
from harness.forms.terms import Collective, Volume, gathered, over_steps, reducing_passes
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
    found = [
        collective
        for term, passes in reducing_passes(workload.reductions)
        for collective in gathered(
            "backward", term, sizes, reduce_dtype(workload), op="all_reduce", passes=passes
        )
    ]

    def step(_: Workload, __: int) -> list[Collective]:
        return found

    remarks = tuple(reduction_remarks(workload))
    return Volume(collectives=tuple(over_steps(workload, step)), remarks=remarks)
