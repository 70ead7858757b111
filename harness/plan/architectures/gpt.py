"""Decoders with biases and layer norms, from GPT-2 on (transformers 5.23, `models/*/modeling_*.py`)."""

from __future__ import annotations

from collections.abc import Callable

from harness.plan.architectures.architecture import Architecture, Tensors, Values
from harness.plan.architectures.llama import around_blocks, key_heads, rotary

GPT2_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


def _conv1d(tensors: Tensors, name: str, inputs: int, outputs: int) -> None:
    """`Conv1D` of pytorch_utils: a linear layer whose matrix stands transposed."""
    tensors.weight(f"{name}.weight", inputs, outputs)
    tensors.weight(f"{name}.bias", outputs)


def _gpt2(values: Values, tensors: Tensors) -> None:
    hidden = values["n_embd"]
    inner = values.get("n_inner") or 4 * hidden

    def block(one: Tensors) -> None:
        one.norm("ln_1", hidden, bias=True)
        _conv1d(one, "attn.c_attn", hidden, 3 * hidden)
        _conv1d(one, "attn.c_proj", hidden, hidden)
        one.norm("ln_2", hidden, bias=True)
        _conv1d(one, "mlp.c_fc", hidden, inner)
        _conv1d(one, "mlp.c_proj", inner, hidden)

    _gpt2_around(values, tensors, block)


def _gpt_bigcode(values: Values, tensors: Tensors) -> None:
    hidden, heads = values["n_embd"], values["n_head"]
    inner = values.get("n_inner") or 4 * hidden
    groups = 1 if values["multi_query"] else values.get("num_key_value_heads") or heads

    def block(one: Tensors) -> None:
        one.norm("ln_1", hidden, bias=True)
        one.linear("attn.c_attn", hidden, hidden + 2 * groups * (hidden // heads), bias=True)
        one.linear("attn.c_proj", hidden, hidden, bias=True)
        one.norm("ln_2", hidden, bias=True)
        one.linear("mlp.c_fc", hidden, inner, bias=True)
        one.linear("mlp.c_proj", inner, hidden, bias=True)

    _gpt2_around(values, tensors, block)
    tensors.buffer("transformer.bias", values["n_positions"], values["n_positions"], dtype="bool")


def _gpt2_around(values: Values, tensors: Tensors, block: Callable[[Tensors], None]) -> None:
    """Embeddings, blocks, last norm and output of GPT-2."""
    hidden, tied = values["n_embd"], bool(values["tie_word_embeddings"])
    tensors.embedding("transformer.wte", values["vocab_size"], hidden, multiplies=tied)
    tensors.embedding("transformer.wpe", values["n_positions"], hidden)
    tensors.repeat("transformer.h", values["n_layer"], block)
    tensors.norm("transformer.ln_f", hidden, bias=True)
    tensors.output("lm_head", "transformer.wte", hidden, values["vocab_size"], tied=tied)


def _bloom(values: Values, tensors: Tensors) -> None:
    hidden, tied = values["hidden_size"], bool(values["tie_word_embeddings"])

    def block(one: Tensors) -> None:
        one.norm("input_layernorm", hidden, bias=True)
        one.linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True)
        one.linear("self_attention.dense", hidden, hidden, bias=True)
        one.norm("post_attention_layernorm", hidden, bias=True)
        one.linear("mlp.dense_h_to_4h", hidden, 4 * hidden, bias=True)
        one.linear("mlp.dense_4h_to_h", 4 * hidden, hidden, bias=True)

    tensors.embedding("transformer.word_embeddings", values["vocab_size"], hidden, multiplies=tied)
    tensors.norm("transformer.word_embeddings_layernorm", hidden, bias=True)
    tensors.repeat("transformer.h", values["n_layer"], block)
    tensors.norm("transformer.ln_f", hidden, bias=True)
    tensors.output("lm_head", "transformer.word_embeddings", hidden, values["vocab_size"], tied=tied)


def _opt(values: Values, tensors: Tensors) -> None:
    hidden, inner, bias = values["hidden_size"], values["ffn_dim"], bool(values["enable_bias"])
    width, tied = values.get("word_embed_proj_dim") or hidden, bool(values["tie_word_embeddings"])

    def block(one: Tensors) -> None:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            one.linear(f"self_attn.{name}", hidden, hidden, bias=bias)
        one.norm("self_attn_layer_norm", hidden, bias=True)
        one.linear("fc1", hidden, inner, bias=bias)
        one.linear("fc2", inner, hidden, bias=bias)
        one.norm("final_layer_norm", hidden, bias=True)

    decoder = "model.decoder"
    tensors.embedding(f"{decoder}.embed_tokens", values["vocab_size"], width, multiplies=tied)
    tensors.embedding(f"{decoder}.embed_positions", values["max_position_embeddings"] + 2, hidden)
    if width != hidden:
        tensors.linear(f"{decoder}.project_out", hidden, width, bias=False)
        tensors.linear(f"{decoder}.project_in", width, hidden, bias=False)
    if values["do_layer_norm_before"] and not values.get("_remove_final_layer_norm"):
        tensors.norm(f"{decoder}.final_layer_norm", hidden, bias=True)
    tensors.repeat(f"{decoder}.layers", values["num_hidden_layers"], block)
    tensors.output("lm_head", f"{decoder}.embed_tokens", width, values["vocab_size"], tied=tied)


def _falcon(values: Values, tensors: Tensors) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    inner, bias = values.get("ffn_hidden_size") or 4 * hidden, bool(values["bias"])
    new, tied = bool(values["new_decoder_architecture"]), bool(values["tie_word_embeddings"])
    head = hidden // heads
    groups = (values.get("num_kv_heads") or heads) if new else 1 if values["multi_query"] else heads

    def block(one: Tensors) -> None:
        one.linear("self_attention.query_key_value", hidden, (heads + 2 * groups) * head, bias=bias)
        one.linear("self_attention.dense", hidden, hidden, bias=bias)
        one.linear("mlp.dense_h_to_4h", hidden, inner, bias=bias)
        one.linear("mlp.dense_4h_to_h", inner, hidden, bias=bias)
        if not values["parallel_attn"]:
            names: tuple[str, ...] = ("post_attention_layernorm", "input_layernorm")
        elif (values.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2:
            names = ("ln_attn", "ln_mlp")
        else:
            names = ("input_layernorm",)
        for name in names:
            one.norm(name, hidden, bias=True)

    tensors.embedding("transformer.word_embeddings", values["vocab_size"], hidden, multiplies=tied)
    tensors.repeat("transformer.h", values["num_hidden_layers"], block)
    tensors.norm("transformer.ln_f", hidden, bias=True)
    rotary(values, tensors, "transformer.rotary_emb")
    tensors.output("lm_head", "transformer.word_embeddings", hidden, values["vocab_size"], tied=tied)


def _mpt(values: Values, tensors: Tensors) -> None:
    hidden, tied = values["d_model"], bool(values["tie_word_embeddings"])
    inner = int(values["expansion_ratio"]) * hidden

    def block(one: Tensors) -> None:
        one.norm("norm_1", hidden, bias=False)
        one.linear("attn.Wqkv", hidden, 3 * hidden, bias=False)
        one.linear("attn.out_proj", hidden, hidden, bias=False)
        one.norm("norm_2", hidden, bias=False)
        one.linear("ffn.up_proj", hidden, inner, bias=False)
        one.linear("ffn.down_proj", inner, hidden, bias=False)

    tensors.embedding("transformer.wte", values["vocab_size"], hidden, multiplies=tied)
    tensors.repeat("transformer.blocks", values["n_layers"], block)
    tensors.norm("transformer.norm_f", hidden, bias=False)
    tensors.output("lm_head", "transformer.wte", hidden, values["vocab_size"], tied=tied)


def _gpt_neox(values: Values, tensors: Tensors) -> None:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    bias, tied = bool(values["attention_bias"]), bool(values["tie_word_embeddings"])

    def block(one: Tensors) -> None:
        one.norm("input_layernorm", hidden, bias=True)
        one.norm("post_attention_layernorm", hidden, bias=True)
        one.linear("attention.query_key_value", hidden, 3 * hidden, bias=bias)
        one.linear("attention.dense", hidden, hidden, bias=bias)
        one.linear("mlp.dense_h_to_4h", hidden, inner, bias=True)
        one.linear("mlp.dense_4h_to_h", inner, hidden, bias=True)

    tensors.embedding("gpt_neox.embed_in", values["vocab_size"], hidden, multiplies=tied)
    tensors.repeat("gpt_neox.layers", values["num_hidden_layers"], block)
    tensors.norm("gpt_neox.final_layer_norm", hidden, bias=True)
    rotary(values, tensors, "gpt_neox.rotary_emb")
    tensors.output("lm_head", "gpt_neox.embed_in", hidden, values["vocab_size"], tied=tied)


def _phi(values: Values, tensors: Tensors) -> None:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    head = hidden // values["num_attention_heads"]
    keys = key_heads(values) * head

    def block(one: Tensors) -> None:
        for name, width in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys), ("dense", hidden)):
            one.linear(f"self_attn.{name}", hidden, width, bias=True)
        for name in ("q_layernorm", "k_layernorm") if values.get("qk_layernorm") else ():
            one.norm(f"self_attn.{name}", head, bias=True)
        one.linear("mlp.fc1", hidden, inner, bias=True)
        one.linear("mlp.fc2", inner, hidden, bias=True)
        one.norm("input_layernorm", hidden, bias=True)

    around_blocks(values, tensors, block, norm="final_layernorm", norm_bias=True)
    tensors.weight("lm_head.bias", values["vocab_size"])


GPT_LIKE = (
    Architecture(
        model_type="gpt2", class_name="GPT2LMHeadModel", build=_gpt2, aliases=GPT2_ALIASES,
        required=GPT2_SIZES, optional={"tie_word_embeddings": True},
    ),
    Architecture(
        model_type="gpt_bigcode", class_name="GPTBigCodeForCausalLM", build=_gpt_bigcode,
        aliases=GPT2_ALIASES, required=GPT2_SIZES,
        optional={"tie_word_embeddings": True, "multi_query": True},
    ),
    Architecture(
        model_type="bloom", class_name="BloomForCausalLM", build=_bloom,
        aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        required={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8},
        optional={"tie_word_embeddings": True},
    ),
    Architecture(
        model_type="opt", class_name="OPTForCausalLM", build=_opt,
        required={"vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
                  "num_attention_heads": 12, "max_position_embeddings": 2048},
        optional={"tie_word_embeddings": True, "do_layer_norm_before": True, "enable_bias": True},
    ),
    Architecture(
        model_type="falcon", class_name="FalconForCausalLM", build=_falcon,
        aliases={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        required={"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
                  "num_attention_heads": 71},
        optional={"tie_word_embeddings": True, "multi_query": True, "parallel_attn": True, "bias": False,
                  "new_decoder_architecture": False, "max_position_embeddings": 2048},
    ),
    Architecture(
        model_type="mpt", class_name="MptForCausalLM", build=_mpt,
        aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        required={"vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16},
        optional={"tie_word_embeddings": True, "expansion_ratio": 4},
    ),
    Architecture(
        model_type="gpt_neox", class_name="GPTNeoXForCausalLM", build=_gpt_neox,
        aliases={"rotary_pct": "partial_rotary_factor"},
        required={"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
                  "num_attention_heads": 64, "intermediate_size": 24576},
        optional={"tie_word_embeddings": False, "attention_bias": True, "partial_rotary_factor": 0.25,
                  "max_position_embeddings": 2048},
    ),
    Architecture(
        model_type="phi", class_name="PhiForCausalLM", build=_phi,
        required={"vocab_size": 51200, "hidden_size": 2048, "num_hidden_layers": 24,
                  "num_attention_heads": 32, "intermediate_size": 8192},
        optional={"tie_word_embeddings": False, "num_key_value_heads": None,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    ),
)  # fmt: skip
