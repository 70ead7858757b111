"""What loading initial weights and saving checkpoints communicate, whatever the strategy."""

from __future__ import annotations

from dataclasses import replace

from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.layout import elements
from harness.forms.terms import Collective, Underived, Volume
from harness.forms.workload import Workload

PIECE_ELEMENTS = 4 * 2**20
"""Of a parameter, read and broadcast at once."""


def loading_collectives(workload: Workload) -> list[Collective]:
    """Under `runtime.loading: broadcast` rank 0 sends every parameter to all ranks in the compute dtype."""
    if workload.loading != "broadcast":
        return []
    parameters = workload.layout.parameters
    if workload.strategy.through_accelerate:
        return _efficient_loading(workload)
    return [
        Collective(
            phase="setup", op="broadcast", dtype=workload.compute_dtype, term="initial weights from rank 0",
            payload_bytes=workload.layout.parameter_count * workload.compute_bytes,
            calls=sum(-(-parameter.numel // PIECE_ELEMENTS) for parameter in parameters),
        )
    ]  # fmt: skip


def _efficient_loading(workload: Workload) -> list[Collective]:
    """Accelerate's `cpu_ram_efficient_loading`: rank 0 sends weights as they are held while they are sharded.

    FSDP1 coalesces them with the buffers (`_sync_module_params_and_buffers`); for FSDP2
    `fsdp2_load_full_state_dict` (accelerate 1.15) takes one call for each.
    """
    layout, coalesced = workload.layout, workload.strategy.family == "fsdp1"
    buffers = sum(tensor.bytes for tensor in layout.buffers) if coalesced else 0
    return [
        Collective(
            phase="setup", op="broadcast", dtype=dtype, term="initial weights from rank 0",
            payload_bytes=elements(alike) * DTYPE_BYTES[dtype] + buffers,
            calls=None if coalesced else len(alike),
        )
        for dtype, alike in workload.by_held_dtype(layout.parameters).items()
    ]  # fmt: skip


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
