"""Seconds of what lies on the host: the update there, and bytes between device and host. Nothing hides."""

from __future__ import annotations

from harness.planning.constants import TimeConstants
from harness.planning.time_term import TimeTerm
from harness.planning.work import Work

ADAM_BYTES = {"foreach": 80, "for-loop": 80, "fused": 28}
"""Per fp32 element that AdamW reads and writes: fused 4 reads and 3 writes; else a pass per operation:
decay 8, first moment 12, second 8 + 12, root 8, correction 8, epsilon 8, update 16 (torch/optim/adamw.py)."""


def host_terms(work: Work, constants: TimeConstants) -> list[TimeTerm]:
    """The update of an offloaded optimizer; gradients down and weights up; offloaded weights at each pass."""
    workload, elements = work.workload, work.host_elements
    if workload.offload == "none" or workload.device == "cpu":
        return []
    update = elements * ADAM_BYTES["for-loop"] / constants.host_bytes_per_second
    width, link = workload.compute_bytes, constants.host_link_bytes_per_second
    moved = 2 * elements * width
    if workload.offload == "cpu":
        passes = 3 if workload.activation_checkpointing else 2
        moved += elements * width * passes * workload.accumulation_steps
    return [
        TimeTerm(
            name="optimizer step on the host",
            seconds=update,
            formula=f"{ADAM_BYTES['for-loop']} bytes x elements that a rank updates / host memory",
            source="torch/optim/adamw.py, passes counted",
        ),
        TimeTerm(
            name="between device and host",
            seconds=moved / link,
            formula="gradients down, weights up, offloaded weights at each pass / host link",
            source="PCIe",
        ),
    ]
