"""Tensors that transformers builds, names and shapes in closed form, by the rows of `architectures.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from math import prod
from typing import Any

from harness.errors import HarnessError
from harness.forms.layout import Layout, Tensor, elements

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of a table of tensors; see `architectures.toml`."""

    name: str
    kind: str
    sizes: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """'bias' or 'multiplies' -> the flag that it depends on; '': on none."""
    condition: str = ""


@dataclass
class Tensors:
    """A model under construction; all parameters in fp32."""

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    looked_up: int = 0
    """Elements of embedding tables that take part in no matrix product."""
    idle: int = 0
    """Parameters of experts that a token does not pass."""

    def add(self, row: Row, values: Values, prefix: str = "") -> None:
        """The tensors of any row but 'blocks'. values: of the configuration and `sizes_of` it."""
        name, kind, options = f"{prefix}{row.name}", row.kind, row.options
        if kind == "tied":
            self.tied[name] = row.sizes[0]
        elif kind == "block":
            self.blocks.append(name)
        elif kind == "rotary":
            fraction = values["rotary_factor"]
            rotated = -(-int(values["head"] * fraction) // 2)
            for attention in _rotary_names(values):
                for which in ("inv_freq", "original_inv_freq"):
                    self.buffers.append(Tensor(f"{name}.{attention}{which}", (rotated,), "float32"))
        elif kind == "output" and values["tie_word_embeddings"]:
            self.tied[f"{name}.weight"] = f"{row.sizes[0]}.weight"
        else:
            shape = tuple(_size(text, values) for text in row.sizes[kind == "output" :])
            if kind.startswith("buffer"):
                self.buffers.append(Tensor(name, shape, kind.partition(".")[2] or "float32"))
                return
            if kind == "experts":
                *matrix, experts, active = shape
                shape = (experts, *matrix)
                self.idle += prod(matrix) * (experts - active)
            elif kind in ("linear", "output"):
                shape = shape[::-1]
            elif kind == "embedding" and not _has(options, "multiplies", values):
                self.looked_up += prod(shape)
            own_name = kind in ("weight", "experts")
            self.parameters.append(Tensor(name if own_name else f"{name}.weight", shape, "float32"))
            if _has(options, "bias", values):
                self.parameters.append(Tensor(f"{name}.bias", shape[:1], "float32"))

    @property
    def multiplying(self) -> int:
        """Parameters that a token is multiplied with: not those that are looked up only, or idle."""
        return elements(self.parameters) - self.looked_up - self.idle

    def layout(self) -> Layout:
        """As closed forms take it; matrices decay."""
        return Layout(
            parameters=tuple(self.parameters),
            decaying=frozenset(tensor.name for tensor in self.parameters if len(tensor.shape) > 1),
            buffers=tuple(self.buffers),
            blocks=tuple(self.blocks),
            tied=self.tied,
        )


def _size(text: str, values: Values) -> int:
    """A sum of products of numbers and of values by their names."""
    return sum(
        prod(int(factor if factor.isdigit() else values[factor]) for factor in term.split("*"))
        for term in text.split("+")
    )


def _has(options: Mapping[str, str], option: str, values: Values) -> bool:
    return option in options and (not options[option] or bool(values.get(options[option])))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers 5 in closed form; a test compares each with the class on the meta device."""

    model_type: str
    class_name: str
    """Class in transformers, such as 'LlamaForCausalLM'."""
    tensors: tuple[str, ...]
    """Parts whose rows make the model, in the order in which the class registers them."""
    block: tuple[str, ...] = ()
    """Parts of each block."""
    parts: Mapping[str, str]
    """Rows of each part."""
    required: Mapping[str, Any]
    """Values that a configuration must give -> what transformers takes in their absence."""
    optional: Mapping[str, Any]
    """Values that decide shapes too -> what transformers takes in their absence."""
    aliases: Mapping[str, str]
    """Other spelling that transformers accepts -> the name used here."""
    fixed: Mapping[str, Any]
    """What no configuration changes."""
    causal: bool = True
    """Whether it is a causal language model, which alone the harness trains."""
    is_mixture: bool = False

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
                    others = (alias for alias, name in self.aliases.items() if name == key)
                    spelled = "' or '".join((key, *others))
                    raise HarnessError(f"{where} lacks '{spelled}', which a {self.model_type} needs")
                values[key] = default
            if not isinstance(values[key], int) or isinstance(values[key], bool) or values[key] < 1:
                raise HarnessError(
                    f"{where}: '{key}' was given {values[key]!r}; it must be a whole number of at least 1"
                )
        return values

    @cached_property
    def _rows(self) -> dict[str, list[Row]]:
        return {name: [_row(line) for line in text.strip().splitlines()] for name, text in self.parts.items()}

    def build(self, values: Values) -> Tensors:
        """The tensors of a configuration's `values`. Raises HarnessError for unlike blocks of a mixture."""
        if self.is_mixture and (values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1):
            raise HarnessError("blocks without experts among those with experts are not covered")
        found, known = Tensors(), {**sizes_of(values), **self.fixed}
        for row in self._chosen(self.tensors, known):
            if row.kind != "blocks":
                found.add(row, known)
                continue
            count, *parts = row.sizes
            for index in range(known[count]):
                name = f"{row.name}.{index}"
                found.blocks.append(name)
                for inside in self._chosen(parts or self.block, {**known, "first": index == 0}):
                    found.add(inside, known, f"{name}.")
        return found

    def _chosen(self, parts: Sequence[str], known: Values) -> list[Row]:
        """The rows of parts whose condition holds."""
        rows = [row for part in parts for row in self._rows[part]]
        return [
            row
            for row in rows
            if not row.condition
            or bool(known.get(row.condition.removeprefix("not "))) != row.condition.startswith("not ")
        ]


_OPTION = re.compile(r"(bias|multiplies)(?:\?(\w+))?")


def _row(line: str) -> Row:
    text, _, condition = line.partition(" if ")
    name, kind, *words = text.split()
    options = {match[1]: match[2] or "" for word in words if (match := _OPTION.fullmatch(word))}
    sizes = tuple(word for word in words if not _OPTION.fullmatch(word))
    return Row(name, kind, sizes, options, condition.strip())


def head_size(values: Values) -> int:
    """`head_dim`, or the hidden size divided by the heads."""
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def sizes_of(values: Values) -> dict[str, Any]:
    """Values of a configuration with the sizes and flags that follow from them."""
    get: Callable[[str], Any] = values.get
    hidden = get("hidden_size") or get("n_embd") or get("d_model")
    heads = get("num_attention_heads") or get("n_head") or get("n_heads") or get("num_heads")
    groups = get("num_key_value_heads") or heads
    if get("new_decoder_architecture"):
        groups = get("num_kv_heads") or heads
    elif get("multi_query"):
        groups = 1
    head = int(get("head_dim") or hidden // heads)
    rope = get("rope_parameters") or get("rope_scaling") or {}
    norms_of_falcon = get("num_ln_in_parallel_attn") or (2 if get("new_decoder_architecture") else 1)
    embedded = get("word_embed_proj_dim") or hidden
    return {
        "output_bias": get("attention_bias"),
        **values,
        "hidden": hidden,
        "inner": get("n_inner") or get("ffn_hidden_size") or 4 * hidden,
        "head": head,
        "queries": heads * head,
        "keys": groups * head,
        # A partial factor rotates only the first part of each head.
        "rotary_factor": rope.get("partial_rotary_factor") or get("partial_rotary_factor") or 1.0,
        "two_norms": get("parallel_attn") and norms_of_falcon == 2,
        "embedded": embedded,
        "projects": embedded != hidden,
        "last_norm": get("do_layer_norm_before") and not get("_remove_final_layer_norm"),
        "gated": str(get("feed_forward_proj")).startswith("gated"),
        "decoder_layers": get("num_decoder_layers") or get("num_layers"),
    }


def _rotary_names(values: Values) -> list[str]:
    """Gemma 3 has frequencies of each kind of attention: by `layer_types`, or every sixth layer with full
    attention (`sliding_window_pattern`)."""
    if values.get("model_type") != "gemma3_text":
        return [""]
    pattern = values.get("sliding_window_pattern") or 6
    full = ["full_attention"] if values["num_hidden_layers"] >= pattern else []
    kinds = values.get("layer_types") or ["sliding_attention", *full]
    return [f"{kind}_" for kind in ("full_attention", "sliding_attention") if kind in kinds]


def _read() -> dict[str, Architecture]:
    document = tomllib.loads(files(__package__).joinpath("architectures.toml").read_text(encoding="utf-8"))
    types: dict[str, dict[str, Any]] = document["types"]

    def complete(name: str) -> dict[str, Any]:
        entry = dict(types[name])
        absent = dict.fromkeys(entry.pop("absent", ()))
        base = complete(like) if (like := entry.pop("like", None)) else {}
        merged = {
            key: {**base.get(key, {}), **entry.get(key, {})}
            for key in ("required", "optional", "aliases", "fixed", "parts")
        }
        merged["optional"] = {**absent, **merged["optional"]}
        return {**base, **entry, **merged}

    return {
        name: Architecture(
            **{
                **found,
                "model_type": name,
                "tensors": tuple(found["tensors"]),
                "parts": {**document["parts"], **found["parts"]},
            }
        )
        for name in types
        if (found := complete(name))
    }


ARCHITECTURES = _read()
MIXTURES = tuple(name for name, entry in ARCHITECTURES.items() if entry.is_mixture)


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
    # Yi's first releases (modeling_yi.py); later ones say llama.
    "Yi": lambda config: _kept(config, model_type="llama"),
    "baichuan": _baichuan,
    "chatglm": _chatglm,
}


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configurations of transformers give a number of experts."""


def mixture_of_experts(config: Values) -> bool:
    """Whether tokens pass only some of the parameters, so that activations and speed are not predicted."""
    return any((config.get(key) or 0) > 1 for key in EXPERTS)
