"""Finds the model that a person names: in the catalogue, in a folder or in a file. No weights, no hub.

Its tensors, those that transformers builds, have names and shapes in closed form: `architectures.toml`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.backends.refusals import did_you_mean, suggestion
from harness.backends.yaml_values import parse_value
from harness.errors import HarnessError
from harness.files import read_settings
from harness.forms.layout import Layout, Tensor, elements
from harness.job.config import load_experiment
from harness.launch.launcher import require_libraries
from harness.nested import mapping
from harness.plan.catalogue import read_entries
from harness.plan.model import EXPERTS, PlannedModel, mixture_of_experts
from harness.tell.formats import gigabytes

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


DOCUMENT = tomllib.loads(files(__package__).joinpath("architectures.toml").read_text(encoding="utf-8"))


def _architectures() -> dict[str, Architecture]:
    types: dict[str, dict[str, Any]] = DOCUMENT["types"]

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
                "parts": {**DOCUMENT["parts"], **found["parts"]},
            }
        )
        for name in types
        if (found := complete(name))
    }


ARCHITECTURES = _architectures()
MIXTURES = tuple(name for name, entry in ARCHITECTURES.items() if entry.is_mixture)


KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip
"""Values with one meaning everywhere."""


def as_known_type(config: Values) -> dict[str, Any] | None:
    """The configuration of the type in transformers whose tensors differ in names and in which matrices are
    one (`own_code` in `architectures.toml`); None: the type brings no code that is known here, or values of
    it have no counterpart.
    """

    def given(key: str, absent: Any) -> Any:
        return absent if config.get(key) is None else config[key]

    own = DOCUMENT["own_code"].get(str(config.get("model_type")))
    size, heads = config.get("kv_channels"), config.get("num_attention_heads")  # what the type here derives
    has_heads = size is None or not isinstance(heads, int) or size * heads == config.get("hidden_size")
    if own is None or not has_heads or any(given(*asked) != is_so for *asked, is_so in own.get("needs", ())):
        return None
    found: dict[str, Any] = {key: config.get(key) for key in KEPT}
    for name, key, *others in own.get("take", ()):
        key, _, flag = key.partition("?")
        if not flag or config.get(flag):
            found[name] = given(key, others[0] if others else found.get(name))
    found |= {key: found[key] // 2 for key in own.get("halve", ()) if isinstance(found[key], int)}
    return {"model_type": own["like"], **{key: value for key, value in found.items() if value is not None}}


MIXTURE = "mixture of experts"
COVERED = f"of mixtures, types {' and '.join(MIXTURES)} are covered"
UNLIKE_SHARE = 0.05
"""Of the states of another strategy, from which a difference is explained."""


def why_uneven(held_bytes: Mapping[str, int], config: Mapping[str, Any]) -> str | None:
    """Why fsdp holds more than zero3 on as many ranks; None: it does not. held_bytes: of states, by label."""
    fsdp, zero3 = held_bytes.get("fsdp", 0), held_bytes.get("zero3", 0)
    if not zero3 or fsdp <= (1 + UNLIKE_SHARE) * zero3:
        return None
    experts = next(config[key] for key in EXPERTS if config.get(key))
    return (
        f"fsdp holds {gigabytes(fsdp)} GB of states and zero3 {gigabytes(zero3)}: FSDP2 cuts the experts of "
        f"a layer, one tensor, by their number, so no more than {experts} ranks share them; ZeRO-3 and FSDP1 "
        "cut flat tensors"
    )


FOLDER = "models"
NOT_COVERED = "reason"
"""Key of an entry that says why no closed form covers the model."""


def load_model(text: str, *, by_known_type: bool = True, assignments: Sequence[str] = ()) -> PlannedModel:
    """The model that `--model` names: catalogue entry, folder with config.json, or configuration file.

    by_known_type: one that brings its own code is that of transformers with the same tensors, as in the
    catalogue. assignments: of `--set`; those of `model.config` change the model, as they do that of a run.
    Raises HarnessError: unknown, not covered, unreadable, or without a value that decides shapes.
    """
    config, name, source = _named(text, by_known_type=by_known_type)
    own = [given for given in assignments if given.partition("=")[0].split(".")[:2] == ["model", "config"]]
    if own:
        whole = f"model.config={json.dumps(config, default=str)}"
        config = load_experiment(None, (whole, *own)).model.config_values()
        source = ", ".join([source, *own])
    return from_config(config, name=name, source=source, given_whole=not own)


def _named(text: str, *, by_known_type: bool) -> tuple[dict[str, Any], str, str]:
    """Configuration, name and source."""
    path = Path(text)
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise HarnessError(
                f"--model {text}: the folder has no config.json; give a model's folder, or its name"
            )
    elif path.is_file():
        file = path
    else:
        name, entry = find_entry(text)
        if NOT_COVERED in entry:
            reason = f"{entry[NOT_COVERED]}; {COVERED}, or choose a dense model"
            raise HarnessError(f"{name} is not covered: {reason}")
        return dict(entry["config"]), name, f"catalogue: {entry.get('hub') or name}"
    config, source = dict(_read(file)), str(file)
    if by_known_type and (known := as_known_type(config)) is not None:
        source += f", {config['model_type']} with the code of {known['model_type']} in transformers"
        config = dict(known)
    return config, path.resolve().name if path.is_dir() else path.stem, source


def model_settings(text: str) -> tuple[str, ...]:
    """Assignments for `--set` that make a job of the same model with random weights; no hub is needed.

    What a job says of where its own model comes from goes with that model.
    """
    path = Path(text)
    own = ("factory=null", "arguments={}", "revision=null", "trust_remote_code=false", "block_class=null")
    file = path / "config.json"
    if path.is_dir() and not (file.is_file() and as_known_type(_read(file))):
        found = ("config=null", f"name={text}", "weights=random")
    else:
        config = load_model(text).config if path.exists() else find_entry(text)[1]["config"]
        found = ("name=null", "weights=null", f"config={json.dumps(config, default=str)}")
    return tuple(f"model.{assignment}" for assignment in (*own, *found))


def catalogue_names() -> list[str]:
    """Names of the models that the catalogue covers."""
    return [name for name, entry in read_entries(FOLDER).items() if NOT_COVERED not in entry]


def catalogue_lines() -> list[str]:
    """The catalogue as a table: name, hub id, published parameters."""
    rows = [[name, entry.get("hub") or "", _published(entry)] for name, entry in read_entries(FOLDER).items()]
    headers = ["name", "hub", "parameters"]
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True).splitlines()


def _published(entry: Mapping[str, Any]) -> str:
    if NOT_COVERED in entry:
        return f"not covered: {entry[NOT_COVERED]}"
    count = entry["published"]
    return f"{count:,}" if isinstance(count, int) else str(count)


def from_config(
    config: Mapping[str, Any], *, name: str, source: str, given_whole: bool = True
) -> PlannedModel:
    """A model from values of its Hugging Face configuration.

    Types without a closed form are built on the meta device, which imports torch. given_whole: values that
    decide shapes must be given; otherwise transformers' defaults hold, as in a job's `model.config`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise HarnessError(f"{source} lacks 'model_type', such as llama; give a Hugging Face config.json")
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        if mixture_of_experts(config):
            raise HarnessError(f"{name} is not covered: {MIXTURE} of type {model_type}; {COVERED}")
        require_libraries(f"models of a type without a closed form, such as {name},")
        from harness.rank.job_check import describe_on_meta  # loads torch and transformers

        return PlannedModel(name=name, source=source, **describe_on_meta(config, source))
    return planned(
        architecture, architecture.values(config, given_whole=given_whole, where=source), name, source
    )


def planned(architecture: Architecture, values: Mapping[str, Any], name: str, source: str) -> PlannedModel:
    """Build the tensors of an architecture in closed form."""
    tensors = architecture.build(values)
    names = {new: old for old, new in architecture.aliases.items()}
    config = {**values, **{names[key]: value for key, value in values.items() if key in names}}
    heads = config["num_attention_heads"]
    return PlannedModel(
        name=name,
        source=source,
        architecture=architecture.class_name,
        config=config,
        layout=tensors.layout(),
        multiplying_parameters=tensors.multiplying,
        idle_parameters=tensors.idle,
        layers=config["num_hidden_layers"],
        attention_width=heads * head_size(config),
    )


def find_entry(text: str) -> tuple[str, dict[str, Any]]:
    """Name and entry of a catalogue's model by name, alias or hub id, in any case and whoever's copy it is.

    Raises HarnessError with the closest names.
    """
    entries = read_entries(FOLDER)
    spellings: dict[str, str] = {}
    for name, entry in entries.items():
        hub = entry.get("hub") or name
        for spelling in (hub, hub.rpartition("/")[2], *entry.get("aliases", ()), name):
            spellings[spelling.lower()] = name
    wanted = text.strip().lower()
    if wanted not in spellings:
        plain = {_plain(spelling): spelling for spelling in spellings}
        wanted = plain.get(_plain(wanted), wanted)
    if wanted not in spellings:
        close = suggestion(wanted.rpartition("/")[2], sorted(spellings), most=3)
        if not close and (of_size := [name for name in entries if wanted in name.lower().split("-")]):
            close = did_you_mean(of_size[:6])
        path = Path(text)
        is_path = not path.is_absolute() and (
            len(path.parts) > 1 or path.suffix in (".json", ".yaml", ".yml")
        )
        where = f" in {Path.cwd()}" if is_path else ""
        raise HarnessError(
            f"model '{text}' is neither in the catalogue nor a folder or file{where}. {close or ''} ".rstrip()
            + " `harness estimate --list models` lists the catalogue"
        )
    name = spellings[wanted]
    return name, entries[name]


TUNED = re.compile(r"^meta-|-(hf|chat|instruct|base|it)(?=-|$)")
"""Parts of names on the hub that leave the geometry as it is."""


def _plain(spelling: str) -> str:
    """A name on the hub without its owner and what does not decide shapes: 'llama-2-7b'."""
    return TUNED.sub("", spelling.rpartition("/")[2].replace("_", "-"))


def _read(path: Path) -> dict[str, Any]:
    text = read_settings(path, "--model")
    try:
        document = (
            json.loads(text, object_pairs_hook=mapping) if path.suffix == ".json" else parse_value(text)
        )
    except json.JSONDecodeError as error:
        raise HarnessError(f"--model {path} is not valid JSON, line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise HarnessError(f"--model {path} is nested too deeply") from error
    except ValueError as error:
        raise HarnessError(f"--model {path} {error}") from error
    if not isinstance(document, dict):
        raise HarnessError(f"--model {path} holds no mapping; give a Hugging Face configuration")
    return document
