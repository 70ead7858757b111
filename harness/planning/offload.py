"""Seconds of what lies on the host: the update there, and bytes between device and host. Nothing hides."""

from __future__ import annotations

from harness.planning.constants import TimeConstants
from harness.planning.scenario import Scenario
from harness.planning.time_term import TimeTerm
from harness.theory.families import model_states
from harness.theory.workload import Workload

ADAM_BYTES = {"foreach": 80, "for-loop": 80, "fused": 28}
"""Per fp32 element that AdamW reads and writes: fused 4 reads and 3 writes; else a pass per operation:
decay 8, first moment 12, second 8 + 12, root 8, correction 8, epsilon 8, update 16 (torch/optim/adamw.py)."""


def updated_elements(workload: Workload, *, host: bool) -> float:
    """Elements whose moments a rank holds on its device, or on the host."""
    terms = model_states(workload).terms
    moments = sum(t.bytes for t in terms if t.kind == "optimizer" and t.host == host and not t.extra)
    return moments / (2 * workload.master_bytes)


def host_terms(scenario: Scenario, workload: Workload, constants: TimeConstants) -> list[TimeTerm]:
    """The update of an offloaded optimizer; gradients down and weights up; offloaded weights at each pass."""
    if workload.offload == "none" or scenario.torch_device == "cpu":
        return []
    elements = updated_elements(workload, host=True)
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
