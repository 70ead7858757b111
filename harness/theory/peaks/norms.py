"""The copy that a gradient's norm in fp64 makes of the tensor that it reduces."""

from __future__ import annotations

from harness.theory.peaks.ledger import Holding
from harness.theory.workload import Workload

DOUBLE_BYTES = 8
NORM_COPY = Holding(
    kind="temporary", name="fp64 copy of a gradient, for the norm", formula="8 x the largest gradient",
    source="torch 2.13, ATen/native/ReduceOpsUtils.h, make_reduction: a reduction into fp64 casts its input",
)  # fmt: skip


def harness_norm(workload: Workload, largest: int) -> tuple[Holding, int]:
    """`backends/gradients.py`, global_norm, over tensors of at most `largest` elements.

    Neither dot products of short pieces (fp32 on the CPU) nor `_foreach_norm` (CUDA) copy a gradient; what
    they add up in is less than a thousandth of it.
    """
    copies = workload.device == "cpu" and workload.master_dtype != "float32"
    return NORM_COPY, DOUBLE_BYTES * largest if copies else 0


def deepspeed_norm(workload: Workload, largest: int) -> tuple[Holding, int]:
    """`g.data.to(get_norm_dtype())` of one gradient after the other (DeepSpeed, get_grad_norm_direct)."""
    return NORM_COPY, DOUBLE_BYTES * largest if workload.has_fp64 else 0
