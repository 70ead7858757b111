"""The model of a plan: its tensors and geometry, without weights; with adapters, and the part of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.backends.strategy import StrategyKind
from harness.backends.tensor.plan import HEADS, VOCABULARY
from harness.errors import HarnessError
from harness.forms import pipeline
from harness.forms.activations import ActivationProfile, Segment, Size
from harness.forms.layout import Attention, Layout, Tensor, elements
from harness.forms.tensor import local_workload, ranks_of
from harness.forms.workload import Workload
from harness.job.job import ADAPTER_NAME, ALL_LINEAR, AdapterSection, Job

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configurations of transformers give a number of experts."""


def mixture_of_experts(config: Mapping[str, Any]) -> bool:
    """Whether tokens pass only some of the parameters, so that activations and speed are not predicted."""
    return any((config.get(key) or 0) > 1 for key in EXPERTS)


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model as its configuration describes it."""

    name: str
    source: str
    """Where the configuration comes from: the catalogue's entry, a folder, a file."""
    architecture: str
    """Class in transformers, such as 'LlamaForCausalLM'."""
    config: Mapping[str, Any]
    """Values of the Hugging Face configuration."""
    layout: Layout
    """Parameters in fp32, as every run builds them."""
    multiplying_parameters: int
    """Parameters that take part in matrix products: all but embedding tables that are only looked up."""
    layers: int
    attention_width: int
    """Heads times head size."""
    idle_parameters: int = 0
    """Of a mixture of experts, those of the experts that a token does not pass."""
    whole_because: str | None = None
    """Why every rank builds it whole, whatever `runtime.loading` asks for."""

    @property
    def parameters(self) -> int:
        return self.layout.parameter_count

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes."""
        return self.parameters - self.idle_parameters

    @property
    def counted(self) -> str:
        """As answers name its size."""
        active = f", {self.active_parameters:,} of them active" if self.idle_parameters else ""
        return f"{self.parameters:,} parameters{active}"


HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
INTERMEDIATE_KEYS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff")

UNFUSED_GELU = (19, 27)
"""Reads and writes per element, forward and backward, of transformers' NewGELUActivation: power, tanh, three
products with a constant, two sums, one product of two tensors. BLOOM's own GELU has as many."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight that tokens are multiplied with, as often as it occurs."""

    rows: int
    columns: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Reads and writes of a layer's elementwise kernels per token, in elements of the compute dtype."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder's geometry."""

    hidden: int
    layers: int
    attention_width: int
    heads: int
    """Of attention."""
    head_rows: int
    """Vocabulary of the output projection, or the part of it that a rank multiplies with."""
    matrices: tuple[Weight, ...]
    """Of all blocks together."""
    last: tuple[Weight, ...]
    """The last of each block, whose product recomputation leaves out."""
    traffic: Traffic
    compiled_traffic: Traffic


def decoder(model: PlannedModel) -> Decoder:
    """Read a model's geometry from its tensors, and from its configuration what tensors do not tell."""
    units = [tensors for name, tensors in model.layout.units() if name]
    matrices = ([(t.shape[0], t.shape[1]) for t in block if len(t.shape) == 2] for block in units)
    by_block = [shapes for shapes in matrices if shapes]
    inside = [tensor for tensors in units for tensor in tensors]
    every = Counter(shape for shapes in by_block for shape in shapes)
    hidden = _first(model.config, HIDDEN_KEYS) or min((min(shape) for shape in every), default=1)
    others = model.multiplying_parameters - sum(t.numel for t in inside)
    eager, compiled = _traffic(model, hidden, [t.name for t in inside])
    return Decoder(
        hidden=hidden,
        layers=model.layers,
        attention_width=model.attention_width,
        heads=_first(model.config, HEAD_KEYS) or 1,
        head_rows=max(0, round(others / hidden)),
        matrices=_matrices(every),
        last=_matrices(Counter(shapes[-1] for shapes in by_block)),
        traffic=eager,
        compiled_traffic=compiled,
    )


def _matrices(shapes: Counter[tuple[int, int]]) -> tuple[Weight, ...]:
    return tuple(Weight(rows=r, columns=c, count=n) for (r, c), n in sorted(shapes.items()))


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((int(value) for value in values if value), None)


def _traffic(model: PlannedModel, hidden: int, names: list[str]) -> tuple[Traffic, Traffic]:
    """Count the elementwise kernels of one layer, as transformers 5 runs them eagerly and compiled.

    Per token, with h the hidden size, f the width between the MLP's matrices and a the attention's width:
    residual sums 6 h forward, 6 h backward; the sum of what the projections of attention and MLP give back
    to one input 9 h; RMSNorm in six kernels with fp32 between 18 h forward and 40 h backward, each twice,
    LayerNorm in one 2 h and 5 h; rotary embedding 10 a and 12 a, for queries and keys; gated MLP 5 f and 9 f,
    a plain one 2 f and 3 f.

    Compiled, one kernel stands between two products: a norm with the sum before it 4 h forward and 4 h
    backward, each twice, and what the projections give back to one input 3 h, or 2 h; queries and keys 2 a
    each way; gated MLP 3 f and 5 f, a plain one 2 f and 3 f.
    """
    config, every = model.config, [t.name for t in model.layout.parameters]
    inner = _first(config, INTERMEDIATE_KEYS) or 4 * hidden
    width = model.attention_width
    gated = any("gate" in name or ".w3." in name for name in names)
    # LayerNorm has a bias, but for that of MPT; positions are learned, or biases of the scores, else rotary.
    norms = [name for name in names if "norm" in name or ".ln_" in name]
    rms = not any(name.endswith("bias") for name in norms) and "Mpt" not in model.architecture
    learned = any(word in name for name in every for word in ("wpe.", "position", "relative_attention_bias"))
    rotary = not learned and not any(word in model.architecture for word in ("Bloom", "Mpt"))
    # GPT-2 and BLOOM write the MLP's activation out in several kernels, unless they are told otherwise.
    given = config.get("activation_function") or config.get("hidden_act")
    by_default = any(name in model.architecture for name in ("GPT2", "Bloom"))
    unfused = by_default if given is None else given in ("gelu_new", "gelu_fast", "quick_gelu")
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    queries_and_keys = width * (1 + (keys / heads if heads and keys else 1.0)) if rotary else 0.0
    activation = (5, 9) if gated else UNFUSED_GELU if unfused else (2, 3)
    eager = Traffic(
        forward=(6.0 + (36 if rms else 4)) * hidden + 10 * queries_and_keys + activation[0] * inner,
        backward=((15.0 if gated else 12.0) + (80 if rms else 10)) * hidden
        + 12 * queries_and_keys
        + activation[1] * inner,
        forward_kernels=12 + (12 if rms else 2) + 10 * rotary,
        backward_kernels=20 + (20 if rms else 4) + 12 * rotary,
    )
    return eager, Traffic(
        forward=8 * hidden + 2 * queries_and_keys + (3 if gated else 2) * inner,
        backward=(11 if gated else 10) * hidden + 2 * queries_and_keys + (5 if gated else 3) * inner,
        forward_kernels=12,
        backward_kernels=20,
    )


def heads_of(config: Mapping[str, Any]) -> Attention | None:
    """Heads by a configuration; None where it does not say."""
    layers, heads = _first(config, LAYER_KEYS), _first(config, HEAD_KEYS)
    hidden = _first(config, HIDDEN_KEYS)
    if layers is None or heads is None or hidden is None:
        return None
    return Attention(
        layers=layers,
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
    )


CUT_TYPES = ("llama", "mistral", "qwen2")
"""Types of models whose cut blocks are blocks of the same type with fewer heads and channels."""
EMBEDDING, HEAD = VOCABULARY
CUT_SETTINGS = (*HEADS, "intermediate_size")


def part_of(model: PlannedModel, workload: Workload) -> PlannedModel:
    """The model with the layers, heads and channels that the workload's rank computes."""
    if ranks_of(workload) > 1:
        return _cut(model, workload)
    if not workload.strategy.facts.cuts_layers:
        return model
    cut, layout, held = pipeline.cut_of(workload), workload.layout, pipeline.held(workload)
    stages = cut.of_rank(pipeline.place_of(workload))
    blocks = tuple(name for stage in stages for name in cut.blocks_of(stage))
    inside, everywhere = (tuple(f"{name}." for name in names) for names in (blocks, layout.blocks))
    multiplying = elements(t for t in held if t.name.startswith(inside))
    if cut.stages - 1 in stages:  # what is behind the blocks
        in_blocks = elements(t for t in layout.parameters if t.name.startswith(everywhere))
        multiplying += model.multiplying_parameters - in_blocks
    return replace(
        model,
        layout=replace(layout, parameters=tuple(held), blocks=blocks),
        multiplying_parameters=multiplying,
        layers=len(blocks),
    )


def local_config(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The configuration of a model whose blocks are what one of `ranks` along 'tensor' computes.

    Embedding and head keep all tokens. Raises HarnessError for a type whose blocks are not so divided.
    """
    kind = config.get("model_type")
    if kind not in CUT_TYPES:
        raise HarnessError(
            f"activations of cut layers are predicted for {', '.join(CUT_TYPES)}, not for {kind}"
        )
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    keys = config.get("num_key_value_heads") or heads
    whole = {**config, "num_key_value_heads": keys}
    return {**whole, "head_dim": size, **{name: int(whole[name]) // ranks for name in CUT_SETTINGS}}


def local_profile(profile: ActivationProfile, workload: Workload) -> ActivationProfile:
    """Profile with embedding and head cut by tokens: their weights, not what they compute.

    Logits are gathered, so that every rank has all of them (`backends/tensor/backend.py`). AutoTP cuts no
    embedding, nor a head that is tied to one.
    """
    ranks = ranks_of(workload)
    cut = _cut_tables(workload) if ranks > 1 else set()
    tied = bool(workload.layout.tied)
    return replace(
        profile,
        embedding=_divided(profile.embedding, ranks) if EMBEDDING in cut else profile.embedding,
        head=_divided(profile.head, ranks) if (EMBEDDING if tied else HEAD) in cut else profile.head,
    )


def _cut(model: PlannedModel, workload: Workload) -> PlannedModel:
    ranks = ranks_of(workload)
    layout = local_workload(workload).layout
    missing = workload.layout.parameter_count - layout.parameter_count
    looked_up = workload.layout.parameter_count - model.multiplying_parameters
    kept = looked_up // ranks if EMBEDDING in _cut_tables(workload) else looked_up
    return replace(
        model,
        config={**model.config, **{n: int(v) // ranks for n in CUT_SETTINGS if (v := model.config.get(n))}},
        layout=layout,
        multiplying_parameters=workload.layout.parameter_count - missing - kept,
        attention_width=model.attention_width // ranks,
    )


def _cut_tables(workload: Workload) -> set[str]:
    """Embedding and head, by the names of their layers, if ranks hold parts of them."""
    whole, held = workload.layout.parameters, local_workload(workload).layout.parameters
    layers = {a.name.split(".")[-2] for a, b in zip(whole, held, strict=True) if a.shape != b.shape}
    return layers & set(VOCABULARY)


def _divided(segment: Segment, ranks: int) -> Segment:
    """With constants, which are those of the weights, divided."""

    def of(size: Size) -> Size:
        return Size((size.coefficients[0] // ranks, *size.coefficients[1:]))

    return segment.sized(of, of, of, of)


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
        packed = _is_target(tensor, layout, [ALL_LINEAR]) or (packs_head and module in OUTPUT_PROJECTIONS)
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
    """Scales of a packed weight, whole on every rank: 8 bits per 64 values, and one per 256 of those.

    bitsandbytes 0.50, functional.py: quantize_4bit with compress_statistics; without (not nested), in fp32.
    """
    blocks = -(-tensor.numel // 64)
    if not nested:
        return [Tensor(f"{tensor.name}.absmax", (blocks,), "float32")]
    return [
        Tensor(f"{tensor.name}.absmax", (blocks,), "uint8"),
        Tensor(f"{tensor.name}.nested_absmax", (-(-blocks // 256),), "float32"),
    ]


OUTPUT_PROJECTIONS = ("lm_head", "embed_out")
"""Output projections."""


SHARE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that one tensor feeds."""
OF_ATTENTION = ("o_proj", "out_proj", "self_attention.dense", "attention.dense", "self_attn.dense")
"""Layers whose input is the output of attention, which attention keeps by itself."""


def packed_inputs(
    layout: Layout, adapter: AdapterSection, model_type: str, *, alone: bool = True
) -> dict[str, int]:
    """Layer and width of each tensor that feeds packed layers of a block, and (alone) that nothing else
    keeps.

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
