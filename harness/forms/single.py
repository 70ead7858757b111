"""One process, which holds everything and talks to nobody, and states that other strategies have too."""

from __future__ import annotations

from collections.abc import Callable

from harness.forms.layout import DTYPE_BYTES, Tensor, elements
from harness.forms.terms import ModelStates, Share, Term, Volume, merged, states
from harness.forms.workload import Workload

ADAM_MOMENTS = 2
ADAM_STEP_BYTES = 4
"""torch.optim.AdamW keeps one fp32 scalar `step` per parameter, on the host unless capturable or fused
(torch 2.13, `optim/adam.py`, `Adam._init_group`)."""


def step_counters(count: int, workload: Workload) -> Term:
    """Adam's counters of steps, one per tensor that it updates; DeepSpeedCPUAdam has plain numbers."""
    return Term(
        kind="optimizer",
        name="Adam's step counters",
        bytes=0 if workload.options.get("adam") == "deepspeed" else ADAM_STEP_BYTES * count,
        host=workload.optimizer_implementation != "fused" or workload.offloads_optimizer,
        extra=True,
    )


FROZEN = "frozen weights"


def whole_frozen(workload: Workload) -> Term:
    """Weights that are not trained, where every rank holds them whole."""
    held = sum(tensor.numel * workload.held_bytes(tensor) for tensor in workload.layout.frozen_parameters)
    return Term(kind="weights", name=FROZEN, bytes=held)


def cut_frozen(workload: Workload, share_of: Callable[[list[Tensor]], Share], *, host: bool) -> list[Term]:
    """Weights that are not trained, where ranks hold parts, cut as other weights are, in their own dtypes."""
    found: list[Term] = []
    for parameter in workload.layout.frozen_parameters:
        width = workload.held_bytes(parameter)
        found += share_of([parameter]).terms("weights", FROZEN, width, host=host)
    return merged(found)


def buffer_terms(workload: Workload) -> list[Term]:
    """The model's buffers: every rank holds them, and every library keeps their dtypes here."""
    widened = workload.widened
    size = sum(
        buffer.numel * DTYPE_BYTES["float32" if widened and "float" in buffer.dtype else buffer.dtype]
        for buffer in workload.layout.buffers
    )
    return [Term(kind="buffers", name="model buffers", bytes=size, extra=True)]


def replica_terms(workload: Workload) -> list[Term]:
    """P elements of weights and of gradients, 2 P of Adam, and one step counter per parameter.

    P counts what is trained; frozen weights are there once more, in their own dtype. A parameter that no
    gradient reaches has neither a gradient nor states.
    """
    parameters = workload.layout.reached
    size = elements(parameters) * workload.master_bytes
    held = workload.layout.trained_count * workload.master_bytes
    return [
        Term(kind="weights", name="whole weights", bytes=held),
        whole_frozen(workload),
        Term(kind="gradients", name="whole gradients", bytes=size),
        Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * size),
        step_counters(len(parameters), workload),
        *buffer_terms(workload),
    ]


def replica_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each parameter by group: what an optimizer of whole replicas updates."""
    return [[parameter.numel for parameter in group] for group in workload.layout.reached_groups()]


def normalised_apart(workload: Workload) -> set[str]:
    """Modules that FSDP1's `_auto_wrap` (torch 2.13, _wrap_utils.py) makes units of their own, and the
    cast copy keeps, in fp32: BatchNorm at mixed precision."""
    named = [buffer.name.partition(".running_mean") for buffer in workload.layout.buffers]
    cast = workload.mixed and workload.options.get("auto_wrap") != "none"
    return {module for module, statistics, _ in named if statistics and cast}


def model_states(workload: Workload) -> ModelStates:
    """A whole replica; `single:precision=cast` computes with a copy of it (`backends/single.py`)."""
    terms = replica_terms(workload)
    if workload.options.get("precision") == "cast" and workload.compute_bytes < workload.master_bytes:
        apart, low = normalised_apart(workload), workload.compute_bytes
        parameters = workload.layout.parameters
        copy = sum(t.numel * (4 if t.name.rpartition(".")[0] in apart else low) for t in parameters)
        terms += [
            Term(kind="gathered", name="low-precision copy of the weights", bytes=copy, extra=True),
            *buffer_terms(workload),
        ]
    return states(terms)


def collectives(workload: Workload) -> Volume:
    """Nothing."""
    return Volume()
