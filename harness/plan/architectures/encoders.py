"""BERT and T5, whose memory can be counted although the harness trains causal models alone."""

from __future__ import annotations

from harness.plan.architectures.architecture import Architecture, Tensors, Values


def _bert(values: Values, tensors: Tensors) -> None:
    """`BertModel`, with its pooler (transformers 5.23, `models/bert/modeling_bert.py`)."""
    hidden, inner = values["hidden_size"], values["intermediate_size"]

    def block(one: Tensors) -> None:
        for name in ("query", "key", "value"):
            one.linear(f"attention.self.{name}", hidden, hidden, bias=True)
        one.linear("attention.output.dense", hidden, hidden, bias=True)
        one.norm("attention.output.LayerNorm", hidden, bias=True)
        one.linear("intermediate.dense", hidden, inner, bias=True)
        one.linear("output.dense", inner, hidden, bias=True)
        one.norm("output.LayerNorm", hidden, bias=True)

    positions = values["max_position_embeddings"]
    tensors.blocks.append("embeddings")
    tensors.embedding("embeddings.word_embeddings", values["vocab_size"], hidden)
    tensors.embedding("embeddings.position_embeddings", positions, hidden)
    tensors.embedding("embeddings.token_type_embeddings", values["type_vocab_size"], hidden)
    tensors.norm("embeddings.LayerNorm", hidden, bias=True)
    tensors.buffer("embeddings.position_ids", 1, positions, dtype="int64")
    tensors.buffer("embeddings.token_type_ids", 1, positions, dtype="int64")
    tensors.repeat("encoder.layer", values["num_hidden_layers"], block)
    tensors.linear("pooler.dense", hidden, hidden, bias=True)


def _t5(values: Values, tensors: Tensors) -> None:
    """`T5ForConditionalGeneration` (transformers 5.23, `models/t5/modeling_t5.py`).

    `T5Config` ties the output whatever `tie_word_embeddings` says.
    """
    hidden = values["d_model"]
    tensors.embedding("shared", values["vocab_size"], hidden, multiplies=True)
    _t5_stack("encoder", values["num_layers"], values, tensors, crosses=False)
    _t5_stack(
        "decoder", values.get("num_decoder_layers") or values["num_layers"], values, tensors, crosses=True
    )
    for name in ("encoder.embed_tokens", "decoder.embed_tokens"):
        tensors.tied[f"{name}.weight"] = "shared.weight"
    tensors.output("lm_head", "shared", hidden, values["vocab_size"], tied=True)


def _t5_stack(stack: str, layers: int, values: Values, tensors: Tensors, *, crosses: bool) -> None:
    hidden, inner = values["d_model"], values["d_ff"]
    width = values["num_heads"] * values["d_kv"]
    gated = str(values["feed_forward_proj"]).startswith("gated")

    def attention(name: str, *, positions: bool) -> None:
        for part in ("q", "k", "v"):
            tensors.linear(f"{name}.{part}", hidden, width, bias=False)
        tensors.linear(f"{name}.o", width, hidden, bias=False)
        if positions:
            table = f"{name}.relative_attention_bias"
            tensors.embedding(table, values["relative_attention_num_buckets"], values["num_heads"])

    for index in range(layers):
        block = f"{stack}.block.{index}"
        tensors.blocks.append(block)
        attention(f"{block}.layer.0.SelfAttention", positions=index == 0)
        tensors.norm(f"{block}.layer.0.layer_norm", hidden, bias=False)
        if crosses:
            attention(f"{block}.layer.1.EncDecAttention", positions=False)
            tensors.norm(f"{block}.layer.1.layer_norm", hidden, bias=False)
        last = f"{block}.layer.{2 if crosses else 1}"
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            tensors.linear(f"{last}.DenseReluDense.{name}", hidden, inner, bias=False)
        tensors.linear(f"{last}.DenseReluDense.wo", inner, hidden, bias=False)
        tensors.norm(f"{last}.layer_norm", hidden, bias=False)
    tensors.norm(f"{stack}.final_layer_norm", hidden, bias=False)


ENCODERS = (
    Architecture(
        model_type="bert", class_name="BertModel", build=_bert, causal=False,
        required={"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
                  "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512},
        optional={"type_vocab_size": 2},
    ),
    Architecture(
        model_type="t5", class_name="T5ForConditionalGeneration", build=_t5, causal=False,
        aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads",
                 "num_hidden_layers": "num_layers", "head_dim": "d_kv"},
        required={"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
                  "num_heads": 8},
        optional={"relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
    ),
)  # fmt: skip
