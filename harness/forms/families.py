"""The closed forms by strategy family: a module each, or what a third party brings in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from harness.forms import ddp, pipeline, single, tensor, zero0, zero3, zero12
from harness.forms.fsdp import fsdp1, fsdp2
from harness.forms.layout import derived
from harness.forms.optimizers import with_optimizer, with_whole_matrices
from harness.forms.tensor import fsdp2_tensor, with_attention, zero3_tensor, zero12_tensor
from harness.forms.terms import Collective, ModelStates, Volume
from harness.forms.workload import Workload


class ClosedForms(Protocol):
    """What one implementation of a strategy holds and communicates."""

    def model_states(self, workload: Workload) -> ModelStates:
        """What one rank holds after a backward pass, from the second step on."""

    def collectives(self, workload: Workload) -> Volume:
        """What each rank hands to collectives in the phases 'forward', 'backward' and 'step' of the steps."""


CLOSED_FORMS: dict[str, ClosedForms] = {
    "single": single,
    "ddp": ddp,
    "zero0": zero0,
    "zero12": zero12,
    "zero3": zero3,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "replicate": fsdp2,
    "pipeline": pipeline,
    "tensor": tensor,
    "fsdp2-tensor": fsdp2_tensor,
    "zero12-tensor": zero12_tensor,
    "zero3-tensor": zero3_tensor,
}


def underived(workload: Workload) -> str | None:
    """Why gradients have no closed form; None: they have."""
    layout, strategy = workload.layout, workload.strategy
    if layout.unreached is None:
        return (
            "which parameters get a gradient could not be determined: the loss does not run on tensors "
            "without values (torch's meta device), or its data decide"
        )
    if not layout.unreached:
        return None
    first = min(layout.unreached)
    if strategy.cuts_model or (strategy.family == "zero12" and not zero12.keeps_plain_gradients(workload)):
        return f"no gradient reaches '{first}'; what is kept and sent for it is not modelled"
    return None


EVALUATES_OTHERWISE = (
    "an evaluation runs other modules than training, or in another order; what a step after it finds "
    "gathered is not modelled"
)


@derived
def model_states(workload: Workload) -> ModelStates:
    """The model states of the workload's family."""
    return with_optimizer(workload, CLOSED_FORMS[workload.strategy.family].model_states(workload))


@derived
def collectives(workload: Workload) -> Volume:
    """The collectives of the workload's family, of attention where ranks divide samples, and of Muon."""
    of_family = CLOSED_FORMS[workload.strategy.family].collectives(workload)
    volume = with_attention(workload, with_whole_matrices(workload, of_family))
    follows = any(map(workload.follows_evaluation, workload.steps))
    follows &= workload.strategy.of_family.gathers_as_it_runs and workload.layout.evaluates_alike is False
    unknown = EVALUATES_OTHERWISE if follows else underived(workload)
    return replace(volume, unknown=volume.unknown or unknown)


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
OF_ACTIVATIONS = frozenset({
    tensor.AGAIN, tensor.FORWARD, tensor.BACKWARD, tensor.LOGITS, tensor.KEYS, tensor.ROTATED,
    tensor.GRADIENTS_OF_KEYS, tensor.EXCHANGED, tensor.POSITIONS,
})  # fmt: skip
"""What the next operator of a pass needs: every rank waits for it."""


def gathers_weights(collective: Collective) -> bool:
    """Whether a pass needs what this brings, and it can be brought ahead."""
    is_gather = collective.op == "all_gather" and collective.phase != "step"
    return is_gather and collective.term not in OF_ACTIVATIONS


def reduces_gradients(collective: Collective) -> bool:
    """Whether this could go on beside the backward pass."""
    is_reduction = collective.op in REDUCTIONS and collective.phase == "backward"
    return is_reduction and collective.term not in OF_ACTIVATIONS
