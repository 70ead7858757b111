"""Bytes that offload moves between device and host memory in a step."""

from __future__ import annotations

from harness.theory.common_states import ADAM_MOMENTS
from harness.theory.terms import ModelStates
from harness.theory.workload import Workload


def host_elements(workload: Workload, expected: ModelStates) -> float:
    """Elements that a rank updates in host memory: those of its moments there and in files, without padding
    except that of files."""
    on_host = [term for term in expected.terms if term.host and not term.extra]
    moments = sum(term.bytes for term in (*on_host, *expected.files) if term.kind == "optimizer")
    return moments / (ADAM_MOMENTS * workload.master_bytes)


def host_link_bytes(workload: Workload, elements: float) -> float:
    """Per step of a rank that updates `elements` on the host: gradients down, weights up, both in the compute
    dtype; offloaded weights are read for each pass besides."""
    width = workload.compute_bytes
    moved = 2 * elements * width
    if workload.offloads_weights:
        passes = 3 if workload.activation_checkpointing else 2
        moved += elements * width * passes * workload.accumulation_steps
    return moved
