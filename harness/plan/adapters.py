"""A job's adapters in a plan: their tensors in closed form, and what is not predicted for them."""

from __future__ import annotations

from dataclasses import replace

from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError
from harness.forms.layout import Layout, Tensor, elements
from harness.job.job import ADAPTER_NAME, ALL_LINEAR, AdapterSection, Job

TRANSPOSED = ("gpt2",)
"""Model types whose projections lie as (inputs, outputs): transformers' Conv1D."""
DEFAULT_TARGETS = {
    "bloom": ["query_key_value"], "falcon": ["query_key_value"], "gemma": ["q_proj", "v_proj"],
    "gemma2": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "gpt_bigcode": ["c_attn"],
    "gpt_neox": ["query_key_value"], "llama": ["q_proj", "v_proj"], "mistral": ["q_proj", "v_proj"],
    "opt": ["q_proj", "v_proj"], "phi": ["q_proj", "v_proj", "fc1", "fc2"],
    "qwen2": ["q_proj", "v_proj"], "qwen3": ["q_proj", "v_proj"],
}  # fmt: skip
"""Model type -> what peft adapts where nothing is named (peft 0.21, utils/constants.py); a test compares."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def why_refused(job: Job, strategy: StrategyKind) -> str | None:
    """Why a strategy refuses adapters, as `backends.fsdp.fsdp1.refuse_several_dtypes`; None: it does not."""
    precision, base = job.training.precision, job.adapter.base_dtype
    trained = "bf16" if precision == "bf16" else "fp32"
    if strategy.family == "fsdp1" and base is not None and base != trained:
        return f"FSDP1 flattens parameters of one dtype, not frozen ones in {base} with adapters in {trained}"
    return None


def with_adapters(
    layout: Layout,
    adapter: AdapterSection,
    model_type: str,
    *,
    nested_scales: bool = True,
    packs_head: bool = False,
) -> Layout:
    """The tensors of a model with its adapters, as peft names them, and the rest frozen.

    Each adapted weight of (outputs, inputs) gets A of (rank, inputs) and B of (outputs, rank). Raises
    HarnessError where `targets` leaves the choice to peft or names nothing that the model has.
    """
    if layout.frozen or not adapter.is_present:
        return layout
    targets = adapter.targets or DEFAULT_TARGETS.get(model_type)
    if targets is None:
        raise HarnessError(
            f"adapter.targets is null, and peft's choice for models of type {model_type} is not known here; "
            f"name them to plan such a job, or write [{ALL_LINEAR}]"
        )
    parameters: list[Tensor] = []
    frozen: set[str] = set()
    adapted = {_module(t) for t in layout.parameters if _is_target(t, layout, targets)}
    dtype = DTYPES.get(adapter.base_dtype or "")
    scales: list[Tensor] = []
    for tensor in layout.parameters:
        held = replace(tensor, dtype=dtype) if dtype else tensor
        module, _, own = tensor.name.rpartition(".")
        if module in adapted:
            held = replace(held, name=f"{module}.base_layer.{own}")
        packed = _is_target(tensor, layout, [ALL_LINEAR]) or (packs_head and module in HEADS)
        if adapter.is_quantised and packed:
            held = replace(held, shape=(-(-tensor.numel // 2), 1), dtype="uint8")
            scales += _scales(tensor, nested=nested_scales)
        parameters.append(held)
        frozen.add(held.name)
        if module in adapted and own == "weight":
            parameters += _pair(tensor, adapter.rank, transposed=model_type in TRANSPOSED)
    trained = frozenset(t.name for t in parameters if t.name not in frozen)
    if not trained:
        raise HarnessError(f"adapter.targets {targets} are no linear layers of the model's blocks")
    return replace(
        layout,
        parameters=tuple(parameters),
        decaying=trained,
        buffers=(*layout.buffers, *scales),
        frozen=frozenset(frozen),
        without_gradient=None,
    )


def _scales(tensor: Tensor, *, nested: bool) -> list[Tensor]:
    """Of a packed weight, whole on every rank: one per 64 values, in 8 bits, with a scale per 256 of them.

    bitsandbytes 0.50, functional.py: quantize_4bit with compress_statistics; without (not nested), in fp32.
    """
    blocks = -(-tensor.numel // 64)
    if not nested:
        return [Tensor(f"{tensor.name}.absmax", (blocks,), "float32")]
    return [
        Tensor(f"{tensor.name}.absmax", (blocks,), "uint8"),
        Tensor(f"{tensor.name}.nested_absmax", (-(-blocks // 256),), "float32"),
    ]


HEADS = ("lm_head", "embed_out")
"""Output projections."""


def packed_head(layout: Layout) -> int:
    """Elements of an output projection of its own; 0: the embedding's weight serves."""
    return elements(t for t in layout.parameters if _module(t) in HEADS and len(t.shape) == 2)


def packed_elements(layout: Layout) -> int:
    """Elements of the layers of a block that QLoRA packs."""
    first = f"{layout.blocks[0]}."
    return elements(
        t for t in layout.parameters if t.name.startswith(first) and _is_target(t, layout, [ALL_LINEAR])
    )


SHARE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that one tensor feeds."""
OF_ATTENTION = ("o_proj", "out_proj", "self_attention.dense", "attention.dense", "self_attn.dense")
"""Layers whose input is the output of attention, which attention keeps by itself."""


def packed_inputs(
    layout: Layout, adapter: AdapterSection, model_type: str, *, alone: bool = True
) -> dict[str, int]:
    """Of each tensor that feeds packed layers of a block, and (alone) that nothing else keeps: its layer and
    width.

    An adapter without dropout keeps it too; with dropout it keeps its own copy.
    """
    targets = [] if adapter.dropout else _targets(adapter, model_type)
    found: dict[str, int] = {}
    kept: set[str] = set()
    for tensor in layout.parameters:
        if not _is_target(tensor, layout, [ALL_LINEAR]) or not _module(tensor).startswith(layout.blocks[0]):
            continue
        module = _module(tensor).removeprefix(f"{layout.blocks[0]}.")
        name = module.rpartition(".")[2]
        key = next((names[0] for names in SHARE_INPUT if name in names), module)
        if module.endswith(OF_ATTENTION) or (targets and _is_target(tensor, layout, targets)):
            kept.add(key)
        found[key] = tensor.shape[0] if model_type in TRANSPOSED else tensor.shape[1]
    return {key: width for key, width in found.items() if key not in kept or not alone}


KEYS_AND_VALUES = ("k_proj", "v_proj")


def joined_targets(layout: Layout, adapter: AdapterSection, model_type: str) -> list[str]:
    """Adapted layers where one adapter serves queries, keys and values."""
    targets = _targets(adapter, model_type)
    if targets == [ALL_LINEAR]:
        modules = (_module(t) for t in layout.parameters if _is_target(t, layout, targets))
        targets = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    return [t for t in targets if t not in KEYS_AND_VALUES or "q_proj" not in targets]


def joined_outputs(layout: Layout) -> dict[str, int]:
    """Of layers of a block, each with its width, what lies in one tensor with the values and so lives on."""
    names = (f"{layout.blocks[0]}.self_attn.{name}.weight" for name in ("q_proj", "k_proj"))
    widths = {t.name: t.shape[0] for t in layout.parameters if len(t.shape) == 2}
    return {f"{name} beside values": widths[name] for name in names if name in widths}


def _targets(adapter: AdapterSection, model_type: str) -> list[str]:
    """What is adapted, by peft's choice where nothing is named; empty: that is not known here."""
    return adapter.targets or DEFAULT_TARGETS.get(model_type, [])


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
