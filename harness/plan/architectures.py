"""Tensors that transformers builds, names and shapes in closed form (5.23, `models/*/modeling_*.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import HarnessError
from harness.forms.model.layout import Layout, Tensor, elements


@dataclass
class Tensors:
    """A model under construction; all parameters in fp32."""

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    looked_up: list[Tensor] = field(default_factory=list)
    """Embedding tables that take part in no matrix product."""
    idle: int = 0
    """Parameters of experts that a token does not pass."""

    def weight(self, name: str, *shape: int) -> Tensor:
        """One parameter."""
        tensor = Tensor(name, shape, "float32")
        self.parameters.append(tensor)
        return tensor

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        """`nn.Linear`."""
        self.weight(f"{name}.weight", outputs, inputs)
        if bias:
            self.weight(f"{name}.bias", outputs)

    def experts(self, name: str, rows: int, columns: int, *, experts: int, active: int) -> None:
        """A weight of each expert, of which a token passes the `active` ones."""
        tensor = self.weight(name, experts, rows, columns)
        self.idle += tensor.numel * (experts - active) // experts

    def norm(self, name: str, size: int, *, bias: bool) -> None:
        """`nn.LayerNorm`, or without bias an RMS norm."""
        self.weight(f"{name}.weight", size)
        if bias:
            self.weight(f"{name}.bias", size)

    def embedding(self, name: str, rows: int, width: int, *, multiplies: bool = False) -> None:
        """`nn.Embedding`; one that `multiplies` is the output's matrix too."""
        tensor = self.weight(f"{name}.weight", rows, width)
        if not multiplies:
            self.looked_up.append(tensor)

    def buffer(self, name: str, *shape: int, dtype: str = "float32") -> None:
        """One buffer."""
        self.buffers.append(Tensor(name, shape, dtype))

    def repeat(self, prefix: str, count: int, block: Callable[[Tensors], None]) -> None:
        """`count` equal blocks named `prefix`.0, `prefix`.1 and so on."""
        one = Tensors()
        block(one)
        for index in range(count):
            name = f"{prefix}.{index}"
            self.blocks.append(name)
            self.parameters += [Tensor(f"{name}.{t.name}", t.shape, t.dtype) for t in one.parameters]
            self.looked_up += [Tensor(f"{name}.{t.name}", t.shape, t.dtype) for t in one.looked_up]
        self.idle += count * one.idle

    def output(self, name: str, tied_to: str, hidden: int, vocabulary: int, *, tied: bool) -> None:
        """The matrix that makes logits: its own, or the embedding's."""
        if tied:
            self.tied[f"{name}.weight"] = f"{tied_to}.weight"
        else:
            self.linear(name, hidden, vocabulary, bias=False)

    @property
    def multiplying(self) -> int:
        """Parameters that a token is multiplied with: not those that are looked up only, or idle."""
        return elements(self.parameters) - elements(self.looked_up) - self.idle

    def layout(self) -> Layout:
        """As closed forms take it; matrices decay."""
        return Layout(
            parameters=tuple(self.parameters),
            decaying=frozenset(tensor.name for tensor in self.parameters if len(tensor.shape) > 1),
            buffers=tuple(self.buffers),
            blocks=tuple(self.blocks),
            tied=self.tied,
        )


Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers 5 in closed form; a test compares each with the class on the meta device."""

    model_type: str
    class_name: str
    """Class in transformers, such as 'LlamaForCausalLM'."""
    build: Callable[[Values, Tensors], None]
    """Adds the tensors, in the order in which the class registers them."""
    required: Mapping[str, Any]
    """Values that a configuration must give -> what transformers takes in their absence."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Values that decide shapes too -> what transformers takes in their absence."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spelling that transformers accepts -> the name used here."""
    causal: bool = True
    """Whether it is a causal language model, which alone the harness trains."""

    def values(self, config: Values, *, given_whole: bool, where: str) -> dict[str, Any]:
        """The configuration under the names used here, with what transformers fills in.

        given_whole: False takes transformers' defaults for required values too, as for `model.config` of
        a job. `where` names the configuration in the message. Raises HarnessError for a missing value or
        one that is no positive whole number.
        """
        named = {self.aliases.get(key, key): value for key, value in config.items()}
        values = {**self.optional, **named}
        for key, default in self.optional.items():
            if named.get(key) is None and default is not None:
                values[key] = default
        for key, default in self.required.items():
            if named.get(key) is None:
                if given_whole:
                    raise HarnessError(
                        f"{where} lacks '{self._spellings(key)}', which a {self.model_type} needs"
                    )
                values[key] = default
            if not isinstance(values[key], int) or isinstance(values[key], bool) or values[key] < 1:
                raise HarnessError(
                    f"{where}: '{key}' was given {values[key]!r}; it must be a whole number of at least 1"
                )
        return values

    def _spellings(self, key: str) -> str:
        return "' or '".join((key, *(alias for alias, name in self.aliases.items() if name == key)))


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


ARCHITECTURES = {entry.model_type: entry for entry in (*LLAMA_LIKE, *WITH_EXPERTS, *GPT_LIKE, *ENCODERS)}
MIXTURES = tuple(entry.model_type for entry in WITH_EXPERTS)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configurations of transformers give a number of experts."""


def find_architecture(model_type: str) -> Architecture | None:
    """The closed form of a model type; None: there is none here."""
    return ARCHITECTURES.get(model_type)


def mixture_of_experts(config: Values) -> bool:
    """Whether tokens pass only some of the parameters, so that activations and speed are not predicted."""
    return any((config.get(key) or 0) > 1 for key in EXPERTS)
