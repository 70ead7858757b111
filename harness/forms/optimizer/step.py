"""What torch's AdamW allocates while it updates: square roots of second moments, by implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from harness.backends.optimizer.kinds import LOW_BIT
from harness.forms import pipeline, tensor
from harness.forms.common_states import replica_tensors
from harness.forms.fsdp import fsdp1, fsdp2, fsdp2_tensor
from harness.forms.workload import Workload
from harness.forms.zero import zero3, zero12
from harness.forms.zero.zero_tensor import zero3_tensor, zero12_tensor

Implementation = Literal["for-loop", "foreach", "fused"]
SOURCE = "torch 2.13, optim/adam.py"
FORMULAE: dict[Implementation, tuple[str, str]] = {
    "for-loop": (
        "2 x a tensor and 1 x the one before: its root, the root over the bias correction, the last quotient",
        f"{SOURCE}, _single_tensor_adam",
    ),
    "foreach": (
        "the second moments of the largest group: their roots",
        f"{SOURCE}, _multi_tensor_adam",
    ),
    "fused": ("none: one kernel", f"{SOURCE}, _fused_adam"),
}


@dataclass(frozen=True, kw_only=True)
class StepTemporary:
    """Bytes of one rank that live only within the optimizer's step."""

    bytes: int
    host: bool
    """In host memory also when the run computes on another device."""
    implementation: Implementation
    formula: str
    source: str


def implementation(workload: Workload) -> Implementation:
    """The implementation that runs; torch chooses foreach where all tensors are on CUDA.

    torch 2.13, `optim/optimizer.py`, `_default_to_fused_or_foreach`: the CPU is not among the devices for
    which it chooses foreach, and it never chooses fused.
    """
    if workload.options.get("adam") == "deepspeed":
        return "fused"  # DeepSpeedCPUAdam: one C++ kernel, without temporaries
    if workload.optimizer_implementation != "default":
        return workload.optimizer_implementation
    return "foreach" if workload.device == "cuda" and not workload.offloads_optimizer else "for-loop"


def update_copies(workload: Workload) -> int:
    """Of a flat tensor that is updated at once, the copies that AdamW makes."""
    said: int | None = workload.options.get("update_copies")
    return {"for-loop": 2, "foreach": 1, "fused": 0}[implementation(workload)] if said is None else said


def step_temporary(workload: Workload) -> StepTemporary:
    """What the update of one rank allocates beyond states and gradients.

    `Adam.step` updates one parameter group after the other; DeepSpeed steps each of its flat partitions or
    sub-groups by itself. In a call, for-loop holds `exp_avg_sq.sqrt()` and its quotient by the bias
    correction for one tensor while its variable `denom` still holds the quotient of the tensor before;
    foreach holds the roots of all tensors and divides in place. So on ZeRO's flat partitions, which are one
    tensor, for-loop takes twice what foreach does.
    """
    chosen = implementation(workload)
    calls = updated_tensors(workload)
    copies = workload.options.get("update_copies")
    if copies is not None:
        # 8-bit moments are updated tensor by tensor (torchao 0.18, optim/adam.py, `_AdamBase.step`).
        at_once = max if workload.optimizer in LOW_BIT or chosen == "for-loop" else sum
        elements = copies * max((at_once(call) for call in calls if call), default=0)
    elif chosen == "for-loop":
        elements = max(
            (2 * tensor + last for call in calls for last, tensor in pairwise([0, *call])), default=0
        )
    elif chosen == "foreach":
        elements = max(map(sum, calls), default=0)
    else:
        elements = 0
    formula, source = FORMULAE[chosen]
    return StepTemporary(
        bytes=elements * workload.master_bytes,
        host=workload.offloads_optimizer,
        implementation=chosen,
        formula=formula,
        source=source,
    )


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each tensor that this rank's optimizer updates, by call of torch's update."""
    found = UPDATED.get(workload.strategy.family, replica_tensors)
    return workload.once("updated", lambda: found(workload))


UPDATED: dict[str, Callable[[Workload], list[list[int]]]] = {
    "fsdp1": fsdp1.updated_tensors,
    "fsdp2": fsdp2.updated_tensors,
    "pipeline": pipeline.updated_tensors,
    "fsdp2-tensor": fsdp2_tensor.updated_tensors,
    "tensor": tensor.updated_tensors,
    "zero12": zero12.updated_tensors,
    "zero3": zero3.updated_tensors,
    "zero12-tensor": zero12_tensor.updated_tensors,
    "zero3-tensor": zero3_tensor.updated_tensors,
}
"""The other families update whole parameters."""
