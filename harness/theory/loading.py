"""What loading the initial weights communicates, whatever the strategy."""

from __future__ import annotations

from harness.theory.terms import Collective
from harness.theory.workload import Workload

PIECE_ELEMENTS = 4 * 2**20
"""Of a parameter, read and broadcast at once."""


def loading_collectives(workload: Workload) -> list[Collective]:
    """Under `runtime.loading: broadcast` rank 0 sends every parameter to all ranks in the compute dtype."""
    if workload.loading != "broadcast":
        return []
    parameters = workload.layout.parameters
    return [
        Collective(
            phase="setup", op="broadcast", dtype=workload.compute_dtype, term="initial weights from rank 0",
            payload_bytes=workload.layout.parameter_count * workload.compute_bytes,
            calls=sum(-(-parameter.numel // PIECE_ELEMENTS) for parameter in parameters),
        )
    ]  # fmt: skip
