"""States of optimizers other than AdamW in the masters' dtype, and what AdamW allocates in an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from harness.backends.base import OptimizerKind
from harness.backends.optimizer.kinds import BLOCK_ELEMENTS, LOW_BIT, is_quantised
from harness.backends.strategy import FAMILIES, StrategyKind
from harness.errors import HarnessError
from harness.forms import pipeline, tensor, zero3, zero12
from harness.forms.fsdp import fsdp1, fsdp2
from harness.forms.fsdp.units import shard_role
from harness.forms.layout import Tensor, ceil_to, derived
from harness.forms.single import ADAM_MOMENTS, replica_tensors, step_counters
from harness.forms.tensor import fsdp2_tensor, zero3_tensor, zero12_tensor
from harness.forms.terms import Collective, ModelStates, Term, Volume, gathered, over_steps, states
from harness.forms.workload import Workload

Implementation = Literal["for-loop", "foreach", "fused"]
SOURCE = "torch 2.13, optim/adam.py"
FORMULAE: dict[Implementation, tuple[str, str]] = {
    "for-loop": (
        "2 x a tensor and 1 x the one before: its root, the root over the bias correction, the last quotient",
        f"{SOURCE}, _single_tensor_adam",
    ),
    "foreach": ("the second moments of the largest group: their roots", f"{SOURCE}, _multi_tensor_adam"),
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
    """Copies that AdamW makes of a flat tensor that is updated at once."""
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


@derived
def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each tensor that this rank's optimizer updates, by call of torch's update."""
    return UPDATED.get(workload.strategy.family, replica_tensors)(workload)


UPDATED: dict[str, Callable[[Workload], list[list[int]]]] = {
    "fsdp1": fsdp1.updated_tensors,
    "fsdp2": fsdp2.updated_tensors,
    "replicate": fsdp2.updated_tensors,
    "pipeline": pipeline.updated_tensors,
    "fsdp2-tensor": fsdp2_tensor.updated_tensors,
    "tensor": tensor.updated_tensors,
    "zero12": zero12.updated_tensors,
    "zero3": zero3.updated_tensors,
    "zero12-tensor": zero12_tensor.updated_tensors,
    "zero3-tensor": zero3_tensor.updated_tensors,
}
"""The other families update whole parameters."""


SCALE_BYTES = 4
"""fp32, one per block (`optim/subclass_8bit.py`, `OptimState8bit.zeros`)."""
TABLE_BYTES = 256 * 4
"""`qmap`, fp32, one per tensor and moment; bitsandbytes: one per moment."""
FP32_BYTES = 4
WIDE = "Adam's moments of tensors that are not quantised"
COUNTERS = "step counters"
MUON = "Muon's updates gathered"
OWN_STATES = "what the optimizer of optimizer.factory keeps is counted in a run, not predicted"
GATHERED_IN = {"fp32": "float32", "bf16": "bfloat16"}


def with_optimizer(workload: Workload, expected: ModelStates) -> ModelStates:
    """Model states with the moments of the job's optimizer."""
    if workload.optimizer == "muon":
        return _with_muon(workload, expected)
    if workload.optimizer == "own":
        counted = tuple(term for term in expected.terms if term.kind != "optimizer")
        return ModelStates(terms=counted, unknown=OWN_STATES)
    if workload.optimizer == "sgd":
        # One momentum where Adam has two moments, or nothing, and no counters (torch 2.13, `optim/sgd.py`).
        held = [
            t
            for t in expected.terms
            if t.kind != "optimizer" or (workload.momentum and COUNTERS not in t.name)
        ]
        return states(
            [
                replace(t, name=t.name.replace("Adam's moments", "momentum"), bytes=t.bytes // ADAM_MOMENTS)
                if t.kind == "optimizer"
                else t
                for t in held
            ]
        )
    if workload.optimizer not in LOW_BIT:
        return expected
    by_torchao = workload.optimizer == "adamw-8bit"
    host = any(term.host for term in expected.terms if term.kind == "optimizer" and "moments" in term.name)
    kept = [t for t in expected.terms if t.kind != "optimizer" or (by_torchao and COUNTERS in t.name)]
    sizes = [size for call in updated_tensors(workload) for size in call]
    low = [size for size in sizes if is_quantised(size, workload.optimizer)]
    wide = sum(size for size in sizes if not is_quantised(size, workload.optimizer))
    blocks = sum(-(-size // BLOCK_ELEMENTS) for size in low)
    # bitsandbytes shares one table for each moment, counts steps outside of tensors, and never keeps bf16.
    tables = len(low) if by_torchao else min(1, len(low))
    width = workload.master_bytes if by_torchao else FP32_BYTES

    def optimizer(name: str, size: int, *, extra: bool = False) -> Term:
        return Term(kind="optimizer", name=name, bytes=ADAM_MOMENTS * size, host=host, extra=extra)

    return states(
        [
            *kept,
            optimizer("Adam's moments in 8 bits", sum(low)),
            optimizer("scales of their blocks", SCALE_BYTES * blocks, extra=True),
            optimizer("tables of their values", TABLE_BYTES * tables, extra=True),
            optimizer(WIDE, wide * width),
        ]
    )


def why_not(optimizer: OptimizerKind, strategy: StrategyKind, precision: str = "fp32") -> str | None:
    """Why an optimizer, or a precision, does not run under a strategy; None: it does."""
    shares_samples = strategy.sequence is not None or strategy.family == "pipeline"
    others = ("adam", "sgd", "own")
    if optimizer == "own" and strategy.family == "zero0" and precision != "fp32":
        return (
            "optimizer.factory: DeepSpeed's stage 0 takes a step while it sets up in low precision, which "
            "only optimizers that are known here can forget; use zero1"
        )
    if shares_samples and (precision == "fp8" or optimizer in ("muon", *others)):
        setting = "training.precision=fp8" if precision == "fp8" else f"optimizer.kind={optimizer}"
        return f"{setting} was not validated against the reference where ranks divide samples or layers"
    if precision == "fp8" and strategy.of_family.underneath:
        return (
            "training.precision=fp8: torchao scales rows, and ranks of tensor parallelism hold parts of rows"
        )
    if optimizer == "adamw-8bit-bnb" and strategy.of_family.holds_dtensors:
        return (
            "optimizer.kind=adamw-8bit-bnb: the kernels of bitsandbytes (0.50) take no DTensor, which is "
            "what FSDP2 and tensor parallelism hand to the optimizer; adamw-8bit (torchao) runs there"
        )
    if optimizer in others and strategy.of_family.underneath:
        return f"optimizer.kind={optimizer} was not validated against the reference where ranks cut layers"
    return _why_no_muon(strategy) if optimizer == "muon" else None


def _why_no_muon(strategy: StrategyKind) -> str | None:
    if strategy.of_family.has_matrices and strategy.route != "trainer":
        return None
    if strategy.zero_stage is not None:
        return (
            "optimizer.kind=muon needs whole matrices, and DeepSpeed hands the optimizer flat partitions; "
            "its own Muon clips after it orthogonalises, which is another update"
        )
    if strategy.family == "fsdp1":
        return "optimizer.kind=muon needs whole matrices, and FSDP1 hands the optimizer flat parameters"
    names = ", ".join(name for name, facts in FAMILIES.items() if facts.has_matrices)
    return (
        "optimizer.kind=muon is only run where parameters are whole or cut by rows: under "
        f"{names}, natively or through Accelerate"
    )


def with_whole_matrices(workload: Workload, volume: Volume) -> Volume:
    """The volume and, where ranks hold rows, what Muon gathers in each step: its updates, matrix by matrix,
    padded to whole shards, in the dtype in which it orthogonalises."""
    if workload.optimizer != "muon" or workload.strategy.family != "fsdp2" or workload.shards == 1:
        return volume
    sizes = [
        (tensor.numel, ceil_to(rows, workload.shards) * row)
        for tensor in workload.layout.trained
        if _is_matrix(tensor, workload)
        for rows, row in (tensor.rows,)
    ]
    dtype, role = GATHERED_IN[workload.newton_schulz], shard_role(workload)

    def step(_: Workload, __: int) -> list[Collective]:
        return gathered("step", MUON, sizes, dtype, role=role)

    return replace(volume, collectives=(*volume.collectives, *over_steps(workload, step)))


def _with_muon(workload: Workload, expected: ModelStates) -> ModelStates:
    """Muon keeps one momentum of a matrix and counts no steps (torch 2.13, `optim/_muon.py`).

    Raises HarnessError where ranks update flat partitions, of which Muon knows no matrix.
    """
    groups, updated = workload.layout.update_groups(), updated_tensors(workload)
    if list(map(len, groups)) != list(map(len, updated)):
        raise HarnessError("Muon needs whole matrices, and this strategy updates flat partitions")
    host = any(term.host for term in expected.terms if term.kind == "optimizer" and "moments" in term.name)
    kept = [term for term in expected.terms if term.kind != "optimizer"]
    momentum = moments = counters = 0
    for group, sizes in zip(groups, updated, strict=True):
        for parameter, size in zip(group, sizes, strict=True):
            if _is_matrix(parameter, workload):
                momentum += size
            else:
                moments, counters = moments + size, counters + 1
    width = workload.master_bytes
    return states(
        [
            *kept,
            Term(kind="optimizer", name="Muon's momentum", bytes=momentum * width, host=host),
            Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * moments * width, host=host),
            step_counters(counters, workload),
        ]
    )


def _is_matrix(parameter: Tensor, workload: Workload) -> bool:
    """Whether Muon updates it: of two dimensions, within a block."""
    blocks = tuple(f"{name}." for name in workload.layout.blocks)
    return len(parameter.shape) == 2 and parameter.name.startswith(blocks)
