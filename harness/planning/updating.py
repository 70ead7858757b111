"""Seconds of the optimizer step, on the device and on the host, and of bytes between them. Nothing hides."""

from __future__ import annotations

from harness.forms.network import host_link_bytes
from harness.forms.optimizer_step import implementation
from harness.planning.constants import TimeConstants
from harness.planning.time_term import TimeTerm
from harness.planning.work import Work

ADAM_BYTES = {"foreach": 80, "for-loop": 80, "fused": 28}
"""Per fp32 element that AdamW reads and writes: fused 4 reads and 3 writes; else a pass per operation:
decay 8, first moment 12, second 8 + 12, root 8, correction 8, epsilon 8, update 16 (torch/optim/adamw.py)."""
UPDATE_SECONDS = {
    ("tensor", "for-loop"): 41e-6, ("tensor", "foreach"): 23e-6, ("tensor", "fused"): 2e-6,
    ("DTensor", "for-loop"): 157e-6, ("DTensor", "foreach"): 35e-6, ("DTensor", "fused"): 35e-6,
}  # fmt: skip
"""Per updated tensor, that the host takes in AdamW whatever its size: torch 2.13, 40 tensors of 16 x 16 on a
CPU, least of four runs; fused was not measured. FSDP2 holds its shards as DTensors."""
DTENSORS = ("fsdp2", "fsdp2-tensor", "tensor")
CLIPPING_BYTES = 12
"""Per fp32 gradient: read for the norm, read and written for the factor."""
COPY_BYTES = 12
"""Per element of a low-precision run of DeepSpeed: gradient widened (2 + 4), master narrowed (4 + 2)."""


def device_terms(work: Work, bytes_per_second: float, constants: TimeConstants) -> list[TimeTerm]:
    """Clipping and AdamW on the elements that a rank updates on its device.

    Bytes over memory bandwidth; on CUDA the host starts operators meanwhile, on a CPU it does so in between.
    """
    workload, elements = work.workload, work.device_elements
    kind = implementation(workload)
    per_element = ADAM_BYTES[kind] + (CLIPPING_BYTES if workload.clips else 0)
    copies = COPY_BYTES if workload.strategy.zero_stage and workload.compute_bytes < 4 else 0
    width = per_element * workload.master_bytes / 4 + copies
    moving = elements * width / bytes_per_second
    tensor = "DTensor" if workload.strategy.family in DTENSORS else "tensor"
    starting = (
        work.updated_tensors * UPDATE_SECONDS[tensor, kind] * constants.host_factor if elements else 0.0
    )
    together = max(moving, starting) if workload.device == "cuda" else moving + starting
    return [
        TimeTerm(
            name="optimizer step",
            seconds=together,
            formula=f"{width:g} bytes x elements that a rank updates / M, "
            f"{'or' if workload.device == 'cuda' else 'and'} {work.updated_tensors} {tensor}s x host",
            source="torch/optim/adamw.py, passes counted",
        )
    ]


def host_terms(work: Work, constants: TimeConstants) -> list[TimeTerm]:
    """The update of an offloaded optimizer; gradients down and weights up; offloaded weights at each pass."""
    workload, elements = work.workload, work.host_elements
    if workload.offload == "none" or workload.device == "cpu":
        return []
    per_element = ADAM_BYTES[implementation(workload)]
    update = elements * per_element / constants.host_bytes_per_second
    moved, link = host_link_bytes(workload, elements), constants.host_link_bytes_per_second
    return [
        TimeTerm(
            name="optimizer step on the host",
            seconds=update,
            formula=f"{per_element} bytes x elements that a rank updates / host memory",
            source="torch/optim/adamw.py, passes counted",
        ),
        TimeTerm(
            name="between device and host",
            seconds=moved / link,
            formula="gradients down, weights up, offloaded weights at each pass / host link",
            source="PCIe",
        ),
    ]
