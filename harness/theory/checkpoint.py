"""What saving a checkpoint communicates through `torch.distributed.checkpoint`."""

from __future__ import annotations

from dataclasses import replace

from harness.theory.terms import Underived, Volume
from harness.theory.workload import Workload

PHASE = "checkpoint"
PICKLED_PLANS = Underived(
    phase=PHASE,
    dtypes=("uint8", "int64"),
    reason="torch.distributed.checkpoint plans what each rank writes by pickled objects (uint8, and their "
    "lengths as int64); what a pickle takes depends on names, paths and the version of Python and torch",
)


def with_pickled_plans(workload: Workload, volume: Volume) -> Volume:
    """Add what cannot be derived, if the run saved a checkpoint after its probed steps."""
    if not workload.window.checkpoint:
        return volume
    return replace(volume, underived=(*volume.underived, PICKLED_PLANS))
