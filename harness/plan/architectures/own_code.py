"""Configurations of models with their own code, as those of the type in transformers with the same tensors.

Knows published configurations only; their code is neither loaded nor run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.plan.architectures.architecture import Values

KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip
"""Values with one meaning everywhere."""


def as_known_type(config: Values) -> dict[str, Any] | None:
    """The configuration of the type in transformers whose tensors differ in names and in which matrices are
    one; None: the type brings no code that is known here, or values of it have no counterpart.
    """
    read = _READERS.get(str(config.get("model_type")))
    return None if read is None else read(config)


def _kept(config: Values, **others: Any) -> dict[str, Any]:
    kept = {key: config[key] for key in KEPT if config.get(key) is not None}
    return {**kept, **{key: value for key, value in others.items() if value is not None}}


def _whole_heads(config: Values) -> bool:
    """Whether `kv_channels`, the size of a head, is what the type here derives."""
    size, heads = config.get("kv_channels"), config.get("num_attention_heads")
    return size is None or not isinstance(heads, int) or size * heads == config.get("hidden_size")


def _qwen(config: Values) -> dict[str, Any] | None:
    """Qwen 1 (modeling_qwen.py): `intermediate_size` counts both halves of the gated MLP; queries, keys and
    values have a bias, nothing else does with `no_bias`, as in Qwen 2 with as many heads of keys."""
    if config.get("no_bias") is False or not _whole_heads(config):
        return None
    inner = config.get("intermediate_size")
    return _kept(
        config,
        model_type="qwen2",
        intermediate_size=inner // 2 if isinstance(inner, int) else inner,
        num_key_value_heads=config.get("num_attention_heads"),
        rms_norm_eps=config.get("layer_norm_epsilon"),
        rope_theta=config.get("rotary_emb_base"),
    )


def _internlm(config: Values) -> dict[str, Any]:
    """InternLM and InternLM 2 (modeling_internlm.py, modeling_internlm2.py): `bias`, by default true, is that
    of all four matrices of attention; InternLM 2 has three of them in one."""
    return _kept(config, model_type="llama", attention_bias=config.get("bias", True))


def _yi(config: Values) -> dict[str, Any]:
    """Yi's first releases (modeling_yi.py); later ones say llama."""
    return _kept(config, model_type="llama")


def _baichuan(config: Values) -> dict[str, Any]:
    """Baichuan and Baichuan 2 (modeling_baichuan.py): queries, keys and values in one matrix. The 13B models
    have ALiBi and give `model_max_length` alone."""
    positions = config.get("max_position_embeddings") or config.get("model_max_length")
    return _kept(config, model_type="llama", max_position_embeddings=positions)


def _chatglm(config: Values) -> dict[str, Any] | None:
    """ChatGLM 2, ChatGLM 3 and GLM-4-9B (modeling_chatglm.py): queries, keys and values in one matrix with a
    bias, the gated MLP's two in one; rotary positions in half of each head."""
    plain = config.get("add_qkv_bias") and config.get("rmsnorm", True) and config.get("post_layer_norm", True)
    if not plain or config.get("add_bias_linear") or not _whole_heads(config):
        return None
    grouped = config.get("multi_query_attention")
    return _kept(
        config,
        model_type="qwen2",
        vocab_size=config.get("padded_vocab_size"),
        intermediate_size=config.get("ffn_hidden_size"),
        num_hidden_layers=config.get("num_layers"),
        num_key_value_heads=config.get("multi_query_group_num" if grouped else "num_attention_heads"),
        max_position_embeddings=config.get("seq_length"),
        rms_norm_eps=config.get("layernorm_epsilon"),
    )


_READERS: dict[str, Callable[[Values], dict[str, Any] | None]] = {
    "qwen": _qwen,
    "internlm": _internlm,
    "internlm2": _internlm,
    "Yi": _yi,
    "baichuan": _baichuan,
    "chatglm": _chatglm,
}
