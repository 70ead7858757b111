"""Llama and the decoders that vary it (transformers 5.23, `models/*/modeling_*.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import HarnessError
from harness.plan.architectures.architecture import Architecture, Tensors, Values

SIZES = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip


def head_size(values: Values) -> int:
    """`head_dim`, or the hidden size divided by the heads."""
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def key_heads(values: Values) -> int:
    """Heads of keys and values; as many as of queries unless said otherwise."""
    return int(values.get("num_key_value_heads") or values["num_attention_heads"])


def rotary(values: Values, tensors: Tensors, prefix: str, names: tuple[str, ...] = ("",)) -> None:
    """Frequencies of the rotary embedding, twice: in use, and as they were at first.

    A partial factor rotates only the first part of each head.
    """
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    fraction = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    rotated = -(-int(head_size(values) * fraction) // 2)
    for name in names:
        tensors.buffer(f"{prefix}.{name}inv_freq", rotated)
        tensors.buffer(f"{prefix}.{name}original_inv_freq", rotated)


def around_blocks(
    values: Values, tensors: Tensors, block: Callable[[Tensors], None], *, norm: str = "norm",
    norm_bias: bool = False, scaled: bool = False,
) -> None:  # fmt: skip
    """A table, the blocks, a norm and an output layer; scaled: embeddings are multiplied by a constant."""
    hidden, tied = values["hidden_size"], bool(values["tie_word_embeddings"])
    tensors.embedding("model.embed_tokens", values["vocab_size"], hidden, multiplies=tied)
    tensors.repeat("model.layers", values["num_hidden_layers"], block)
    tensors.norm(f"model.{norm}", hidden, bias=norm_bias)
    if scaled:
        tensors.buffer("model.embed_tokens.embed_scale")
    rotary(values, tensors, "model.rotary_emb", _rotary_names(values))
    tensors.output("lm_head", "model.embed_tokens", hidden, values["vocab_size"], tied=tied)


def _gated(values: Values, one: Tensors) -> None:
    hidden, inner, bias = values["hidden_size"], values["intermediate_size"], bool(values.get("mlp_bias"))
    one.linear("mlp.gate_proj", hidden, inner, bias=bias)
    one.linear("mlp.up_proj", hidden, inner, bias=bias)
    one.linear("mlp.down_proj", inner, hidden, bias=bias)


def _mixed(count: str, width: str, *, router_first: bool) -> Callable[[Values, Tensors], None]:
    """Experts in place of an MLP; of the configuration, `count`: how many, `width`: how wide each is."""

    def build(values: Values, one: Tensors) -> None:
        if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
            raise HarnessError("blocks without experts among those with experts are not covered")
        hidden, experts, inner = values["hidden_size"], values[count], values[width]
        held = {"experts": experts, "active": values["num_experts_per_tok"]}
        if router_first:
            one.weight("mlp.gate.weight", experts, hidden)
        one.experts("mlp.experts.gate_up_proj", 2 * inner, hidden, **held)
        one.experts("mlp.experts.down_proj", hidden, inner, **held)
        if not router_first:
            one.weight("mlp.gate.weight", experts, hidden)

    return build


def decoder(
    *, attention_bias: bool | None = None, output_bias: bool | None = None, head_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"), scaled: bool = False,
    mlp: Callable[[Values, Tensors], None] = _gated,
) -> Any:  # fmt: skip
    """How a variant builds its tensors. None: the configuration's `attention_bias` decides.

    head_norms: query and key have a norm over each head. scaled: the embedding has a scale as a buffer.
    """

    def build(values: Values, tensors: Tensors) -> None:
        hidden, head = values["hidden_size"], head_size(values)
        queries = values["num_attention_heads"] * head
        keys = key_heads(values) * head
        given = bool(values.get("attention_bias"))
        bias = given if attention_bias is None else attention_bias

        def block(one: Tensors) -> None:
            for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                one.linear(f"self_attn.{name}", hidden, width, bias=bias)
            one.linear(
                "self_attn.o_proj", queries, hidden, bias=given if output_bias is None else output_bias
            )
            for name in ("q_norm", "k_norm") if head_norms else ():
                one.norm(f"self_attn.{name}", head, bias=False)
            mlp(values, one)
            for name in norms:
                one.norm(name, hidden, bias=False)

        around_blocks(values, tensors, block, scaled=scaled)

    return build


def _rotary_names(values: Values) -> tuple[str, ...]:
    """Gemma 3 has frequencies of each kind of attention."""
    if values.get("model_type") != "gemma3_text":
        return ("",)
    return tuple(f"{kind}_" for kind in ("full_attention", "sliding_attention") if kind in _kinds(values))


def _kinds(values: Values) -> set[str]:
    """`layer_types`, or every sixth layer with full attention (`sliding_window_pattern`)."""
    given = values.get("layer_types")
    if given:
        return set(given)
    pattern = values.get("sliding_window_pattern") or 6
    layers = values["num_hidden_layers"]
    return {"sliding_attention"} | ({"full_attention"} if layers >= pattern else set())


def _phi3(values: Values, tensors: Tensors) -> None:
    hidden, inner, head = values["hidden_size"], values["intermediate_size"], head_size(values)
    heads, groups = values["num_attention_heads"], key_heads(values)
    bias = bool(values.get("attention_bias"))

    def block(one: Tensors) -> None:
        one.linear("self_attn.o_proj", heads * head, hidden, bias=False)
        one.linear("self_attn.qkv_proj", hidden, (heads + 2 * groups) * head, bias=bias)
        one.linear("mlp.gate_up_proj", hidden, 2 * inner, bias=False)
        one.linear("mlp.down_proj", inner, hidden, bias=False)
        one.norm("input_layernorm", hidden, bias=False)
        one.norm("post_attention_layernorm", hidden, bias=False)

    around_blocks(values, tensors, block)


def _stablelm(values: Values, tensors: Tensors) -> None:
    hidden, inner, head = values["hidden_size"], values["intermediate_size"], head_size(values)
    queries, keys = values["num_attention_heads"] * head, key_heads(values) * head
    bias = bool(values.get("use_qkv_bias"))

    def block(one: Tensors) -> None:
        for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            one.linear(f"self_attn.{name}", hidden, width, bias=bias)
        one.linear("self_attn.o_proj", hidden, hidden, bias=False)
        for name in ("gate_proj", "up_proj"):
            one.linear(f"mlp.{name}", hidden, inner, bias=False)
        one.linear("mlp.down_proj", inner, hidden, bias=False)
        one.norm("input_layernorm", hidden, bias=True)
        if not values.get("use_parallel_residual"):
            one.norm("post_attention_layernorm", hidden, bias=True)

    around_blocks(values, tensors, block, norm_bias=True)


def _entry(
    model_type: str, class_name: str, build: Any, required: Mapping[str, Any] | None = None, **optional: Any
) -> Architecture:
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        build=build,
        required={**SIZES, **(required or {})},
        optional={"tie_word_embeddings": False, "num_key_value_heads": None, **optional},
    )


FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
QWEN = {"vocab_size": 151936, "intermediate_size": 22016}
GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
GEMMA2 = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip

LLAMA_LIKE = (
    _entry("llama", "LlamaForCausalLM", decoder(), max_position_embeddings=2048),
    _entry("granite", "GraniteForCausalLM", decoder(), max_position_embeddings=2048),
    _entry(
        "mistral", "MistralForCausalLM", decoder(attention_bias=False, output_bias=False),
        {"intermediate_size": 14336}, num_key_value_heads=8, max_position_embeddings=131072,
    ),
    _entry(
        "qwen2", "Qwen2ForCausalLM", decoder(attention_bias=True, output_bias=False), QWEN,
        num_key_value_heads=32, max_position_embeddings=32768,
    ),
    _entry(
        "qwen3", "Qwen3ForCausalLM", decoder(head_norms=True), QWEN,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
    ),
    _entry(
        "gemma", "GemmaForCausalLM", decoder(scaled=True),
        {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
         "num_attention_heads": 16},
        **GEMMA, num_key_value_heads=16, max_position_embeddings=8192,
    ),
    _entry(
        "gemma2", "Gemma2ForCausalLM", decoder(scaled=True, norms=FOUR_NORMS), GEMMA2,
        **GEMMA, num_key_value_heads=4, max_position_embeddings=8192,
    ),
    _entry(
        "gemma3_text", "Gemma3ForCausalLM", decoder(scaled=True, norms=FOUR_NORMS, head_norms=True),
        {**GEMMA2, "vocab_size": 262208}, **GEMMA, num_key_value_heads=4, max_position_embeddings=131072,
    ),
    _entry(
        "phi3", "Phi3ForCausalLM", _phi3,
        {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192}, max_position_embeddings=4096,
    ),
    _entry(
        "stablelm", "StableLmForCausalLM", _stablelm,
        {"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912},
        num_key_value_heads=32, partial_rotary_factor=0.25, max_position_embeddings=4096,
    ),
)  # fmt: skip
MIXTRAL = _mixed("num_local_experts", "intermediate_size", router_first=True)
QWEN3_MOE = _mixed("num_experts", "moe_intermediate_size", router_first=False)
WITH_EXPERTS = (
    _entry(
        "mixtral", "MixtralForCausalLM", decoder(attention_bias=False, output_bias=False, mlp=MIXTRAL),
        {"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
        num_key_value_heads=8, max_position_embeddings=131072,
    ),
    _entry(
        "qwen3_moe", "Qwen3MoeForCausalLM", decoder(head_norms=True, mlp=QWEN3_MOE),
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
         "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        num_key_value_heads=4, max_position_embeddings=32768,
    ),
)  # fmt: skip
"""Their activations depend on what the router does with the data; states and traffic do not."""
