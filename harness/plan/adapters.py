"""A job's adapters in a plan: their tensors in closed form, and what is not predicted for them."""

from __future__ import annotations

from dataclasses import replace

from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.forms.layout import Layout, Tensor
from harness.job.job import Job
from harness.job.model import ADAPTER_NAME, ALL_LINEAR, AdapterSection

TRANSPOSED = ("gpt2",)
"""Model types whose projections lie as (inputs, outputs): transformers' Conv1D."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def require_all_trained(job: Job, what: str) -> None:
    """Raise HarnessError for a job with adapters: `what` is modelled only where all weights are trained."""
    if job.adapter.is_present:
        raise HarnessError(
            f"{what} of a job with adapters cannot be predicted: what the backward pass computes and keeps "
            "for frozen layers is not modelled; `harness estimate` gives model states and traffic"
        )


def why_refused(job: Job, strategy: StrategyKind) -> str | None:
    """Why a strategy refuses the adapters, as `backends.fsdp1.refuse_several_dtypes`; None: it does not."""
    precision, base = job.training.precision, job.adapter.base_dtype
    trained = "bf16" if precision == "bf16" else "fp32"
    if strategy.family == "fsdp1" and base is not None and base != trained:
        return f"FSDP1 flattens parameters of one dtype, not frozen ones in {base} with adapters in {trained}"
    return None


def with_adapters(layout: Layout, adapter: AdapterSection, model_type: str) -> Layout:
    """The tensors of a model with its adapters, as peft names them, and the rest frozen.

    Each adapted weight of (outputs, inputs) gets A of (rank, inputs) and B of (outputs, rank). Raises
    HarnessError where `targets` leaves the choice to peft or names nothing that the model has.
    """
    if layout.frozen or not adapter.is_present:
        return layout
    if adapter.is_quantised:
        raise HarnessError("adapter.base_dtype nf4 is not planned: scales of packed weights are not modelled")
    if adapter.targets is None:
        raise HarnessError(
            "adapter.targets is null, which leaves the layers to peft; name them to plan such a job, "
            f"or write [{ALL_LINEAR}]"
        )
    parameters: list[Tensor] = []
    frozen: set[str] = set()
    adapted = {_module(t) for t in layout.parameters if _is_target(t, layout, adapter.targets)}
    dtype = DTYPES[adapter.base_dtype] if adapter.base_dtype is not None else None
    for tensor in layout.parameters:
        held = replace(tensor, dtype=dtype) if dtype else tensor
        module, _, own = tensor.name.rpartition(".")
        if module in adapted:
            held = replace(held, name=f"{module}.base_layer.{own}")
        parameters.append(held)
        frozen.add(held.name)
        if module in adapted and own == "weight":
            parameters += _pair(tensor, adapter.rank, transposed=model_type in TRANSPOSED)
    trained = frozenset(t.name for t in parameters if t.name not in frozen)
    if not trained:
        raise HarnessError(f"adapter.targets {adapter.targets} are no linear layers of the model's blocks")
    return replace(
        layout,
        parameters=tuple(parameters),
        decaying=trained,
        frozen=frozenset(frozen),
        without_gradient=None,
    )


def _is_target(tensor: Tensor, layout: Layout, targets: list[str]) -> bool:
    module = _module(tensor)
    in_block = module.startswith(tuple(f"{block}." for block in layout.blocks))
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight") or not in_block:
        return False
    return targets == [ALL_LINEAR] or any(module == t or module.endswith(f".{t}") for t in targets)


def _pair(tensor: Tensor, rank: int, *, transposed: bool) -> list[Tensor]:
    outputs, inputs = reversed(tensor.shape) if transposed else tensor.shape
    module = _module(tensor)
    return [
        Tensor(f"{module}.lora_A.{ADAPTER_NAME}.weight", (rank, inputs), tensor.dtype),
        Tensor(f"{module}.lora_B.{ADAPTER_NAME}.weight", (outputs, rank), tensor.dtype),
    ]


def _module(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]
