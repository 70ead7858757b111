"""What is trained: everything that decides the mathematics."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

import pydantic

from harness.backends.base import Compile, OptimizerImplementation, OptimizerKind, Precision
from harness.backends.model_source import AskedLoading
from harness.backends.optimizer.kinds import LOW_BIT, OF_TORCH, NewtonSchulz
from harness.backends.refusals import TypedValues
from harness.errors import JobError
from harness.files import added_later
from harness.forms.activations import PARTIAL_CHECKPOINTING

WORDS: dict[str, dict[str, str]] = tomllib.loads(
    files(__package__).joinpath("settings.toml").read_text(encoding="utf-8")
)
"""By class and setting, what it means."""


class SettingsSection(TypedValues):
    """A part of a configuration: frozen, unknown keys refused; settings.toml says what each key means."""

    model_config = pydantic.ConfigDict(defer_build=True)  # schemas are built once the words are in

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, meaning in WORDS.get(cls.__name__, {}).items():
            cls.model_fields[name].description = meaning


_SPELLING = re.compile(r"(?P<place>[^:]+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")


def split_factory(spelling: str) -> tuple[str, str]:
    """('shapes', 'images') of 'shapes:images'; the first is a dotted module or the path of a .py file.

    Raises ValueError.
    """
    found = _SPELLING.fullmatch(spelling)
    if found is None:
        raise ValueError("write module:function, such as my_model:build, or path/to/file.py:function")
    return found["place"], found["function"]


def _checked(spelling: str) -> str:
    split_factory(spelling)
    return spelling


Factory = Annotated[str, pydantic.AfterValidator(_checked)]


def factory_field(makes: str) -> Any:
    """An optional factory, left out of documents of jobs without one. `makes`: what it returns."""
    return added_later(
        None,
        description=f"module:function of your own that returns {makes}; looked for in the file's folder, the "
        "working directory and among installed packages",
    )


def arguments_field() -> Any:
    """Keyword arguments of that factory."""
    return added_later({}, description="keyword arguments of `factory`")


CODE_SWITCH = "model.trust_remote_code"
DEFAULT_MODEL_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


class ModelSection(SettingsSection):
    """The model: a checkpoint by name or path, a configuration with random weights, or your own module."""

    name: str | None = None
    revision: str | None = None
    weights: Literal["pretrained", "random"] | None = None
    trust_remote_code: bool = added_later(False)
    config: dict[str, Any] | None = None
    factory: Factory | None = factory_field("the model, an `nn.Module`; excludes `name` and `config`")
    arguments: dict[str, Any] = arguments_field()
    block_class: str | None = added_later(None)
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    dropout: float | None = pydantic.Field(0.0, ge=0, lt=1)
    compile: Compile = added_later("none")

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.name is not None and self.config is not None:
            raise ValueError("give either `name` or `config`, not both")
        if self.factory is not None and (self.name is not None or self.config is not None):
            raise ValueError("give either `factory` or `name` or `config`, not several")
        if self.arguments and self.factory is None:
            raise ValueError("`arguments` need a `factory`")
        if self.name is None and (self.weights == "pretrained" or self.revision):
            raise ValueError("`weights: pretrained` and `revision` need a `name`")
        if self.trust_remote_code and self.name is None:
            raise ValueError("`trust_remote_code` needs a `name`: only a model by name brings code")
        return self

    @property
    def reads_checkpoint(self) -> bool:
        """Whether the initial weights are those of a checkpoint."""
        return self.name is not None and self.weights != "random"

    @property
    def block_classes(self) -> tuple[str, ...]:
        """Names of the classes that are wrapped; none: as the model declares."""
        return tuple(name.strip() for name in (self.block_class or "").split(",") if name.strip())

    @property
    def attention_kernel(self) -> str | None:
        """What transformers is asked for; None: its own choice."""
        return None if self.attention == "auto" else self.attention

    def config_values(self) -> dict[str, Any]:
        """Configuration values of a model without a name, the default's filled in."""
        given = self.config or {}
        return dict(given) if "model_type" in given else DEFAULT_MODEL_CONFIG | given


ALL_LINEAR = "all-linear"
ADAPTER_NAME = "default"
"""What peft calls an adapter that has no name of its own; a part of parameters' names."""


class AdapterSection(SettingsSection):
    """Low-rank adapters (peft's LoRA): they alone are trained, all other weights are frozen."""

    kind: Literal["none", "lora"] = "none"
    rank: pydantic.PositiveInt = 8
    alpha: pydantic.PositiveFloat = 16.0
    dropout: float = pydantic.Field(0.0, ge=0, lt=1)
    targets: list[str] | None = None
    base_dtype: Literal["fp32", "bf16", "nf4"] | None = None

    @pydantic.model_validator(mode="after")
    def _settings_take_effect(self) -> AdapterSection:
        given = sorted(self.model_fields_set - {"kind"})
        given = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.kind == "none" and given:
            raise ValueError(f"`{given[0]}` would be ignored without an adapter; set `kind: lora`")
        if self.targets is not None and not self.targets:
            raise ValueError("`targets` is empty; name at least one layer, or write null for peft's choice")
        if self.targets and ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"`targets` is either [{ALL_LINEAR}] or names of layers")
        return self

    @property
    def is_quantised(self) -> bool:
        return self.base_dtype == "nf4"

    @property
    def is_present(self) -> bool:
        return self.kind not in (None, "none")  # None: an observed script that does not show it


class LossSection(SettingsSection):
    """The loss: the task's, or a function of your own."""

    factory: Factory | None = factory_field("the loss: a function of (model, batch) that returns a scalar")
    arguments: dict[str, Any] = arguments_field()
    reduction: Literal["sum", "mean"] = "mean"
    targets: Literal["samples", "labels"] = "samples"

    chunk_tokens: pydantic.PositiveInt | None = added_later(None)

    @pydantic.model_validator(mode="after")
    def _arguments_are_used(self) -> LossSection:
        if self.arguments and self.factory is None:
            raise ValueError("`arguments` need a `factory`")
        if self.chunk_tokens is not None and self.factory is not None:
            raise ValueError("`chunk_tokens` would be ignored by a `factory`; remove one of them")
        return self


Source = Literal["prose", "text", "jsonl", "json", "csv", "squad", "datasets", "images", "synthetic-images"]
ROWS = ("jsonl", "json", "csv", "datasets")
"""Sources of rows with named fields."""
IMAGES = ("images", "synthetic-images")
WITHOUT_PATH = ("prose", "synthetic-images")
DEFAULT_CLASSES = 10

Targets = Literal["text", "all", "prompt", "text over prompt"]


class DataSection(SettingsSection):
    """The text or images, how text becomes tokens, and how tokens become samples."""

    source: Source = "prose"
    factory: Factory | None = factory_field("the samples; replaces `source`")
    arguments: dict[str, Any] = arguments_field()
    path: str | None = None
    configuration: str | None = None
    split: str = "train"
    text_field: str = "text"
    prompt_field: str | None = None
    label_field: str = added_later("label")
    tokenizer: str = "bytes"
    sequence_length: pydantic.PositiveInt = pydantic.Field(128, lt=2**31)
    target_length: pydantic.PositiveInt | None = added_later(None, lt=2**31)
    image_size: pydantic.PositiveInt = added_later(32, le=4096)
    classes: pydantic.PositiveInt | None = added_later(None)
    packed: bool | None = None
    document_attention: Literal["across", "within"] = added_later("across")
    shuffle: bool = True
    limit: pydantic.PositiveInt | None = None
    targets: Targets = added_later("text")

    @pydantic.model_validator(mode="after")
    def _path_fits_source(self) -> DataSection:
        if self.factory is not None:
            if self.path is not None or self.source != "prose":
                raise ValueError("give either `factory` or `source` and `path`, not both")
            return self
        if self.arguments:
            raise ValueError("`arguments` need a `factory`")
        if self.source in WITHOUT_PATH and self.path is not None:
            raise ValueError(
                f"`path` would be ignored with source '{self.source}'; set source to text, jsonl, squad, "
                "datasets or another that reads files"
            )
        if self.source not in WITHOUT_PATH and self.path is None:
            raise ValueError(f"source '{self.source}' needs a `path`: --set data.path=FILE")
        if self.classes is not None and self.source != "synthetic-images":
            raise ValueError("`classes` is of source synthetic-images; other data say how many they have")
        return self

    @pydantic.model_validator(mode="after")
    def _samples_are_possible(self) -> DataSection:
        if self.prompt_field is not None and (self.source not in ROWS or self.is_packed):
            raise ValueError(f"`prompt_field` needs source {', '.join(ROWS)} and `packed: false`")
        if self.targets != "text" and not (self.source == "squad" or self.prompt_field):
            raise ValueError("`targets` needs samples with a prompt: source squad, or a `prompt_field`")
        if self.document_attention == "within" and not self.is_packed:
            raise ValueError("`document_attention` is of packed samples; set `packed: true`")
        if self.source == "squad" and self.packed:
            raise ValueError("source 'squad' is one sample per question; leave `packed` out")
        if self.sequence_length < 2:
            raise ValueError("`sequence_length` must be at least 2: a token is predicted from another")
        return self

    @property
    def is_packed(self) -> bool:
        return self.source in ("prose", "text") if self.packed is None else self.packed

    @property
    def is_tokenized(self) -> bool:
        """Whether samples are text that the tokenizer cuts."""
        return self.factory is None and self.source not in IMAGES


@dataclass(frozen=True, kw_only=True)
class UpdateGroup:
    """Parameters that are updated with the same constants; a group of the optimizer."""

    names: frozenset[str]
    weight_decay: float
    rate: float = 1.0
    """Its learning rate over the job's."""


class GroupSection(SettingsSection):
    """Parameters whose names match a pattern, and what of the optimizer's constants is their own."""

    parameters: str = pydantic.Field(min_length=1)
    learning_rate: pydantic.PositiveFloat | None = None
    weight_decay: pydantic.NonNegativeFloat | None = None
    frozen: bool = False

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> GroupSection:
        own = self.learning_rate is not None or self.weight_decay is not None
        if self.frozen and own:
            raise ValueError("`frozen` parameters have no `learning_rate` or `weight_decay`; leave these out")
        if not (self.frozen or own):
            raise ValueError("give `learning_rate`, `weight_decay` or `frozen: true`")
        return self


ADAMS = tuple(kind for kind in get_args(OptimizerKind) if kind not in ("sgd", "own"))
EFFECTIVE: dict[str, tuple[str, ...]] = {
    "implementation": OF_TORCH, "newton_schulz": ("muon",), "momentum": ("sgd",), "arguments": ("own",),
    **dict.fromkeys(("beta1", "beta2", "epsilon"), ADAMS),
}  # fmt: skip
"""Settings that only some kinds have."""


SPELLINGS = {
    "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "adamwtorch8bit": "adamw-8bit",
    "adamwbnb8bit": "adamw-8bit-bnb", "adamw8bitbnb": "adamw-8bit-bnb", "bnbadamw8bit": "adamw-8bit-bnb",
    "adamwtorch": "adamw", "adamwhf": "adamw",
}  # fmt: skip
"""Of kinds, by what other tools call them, without case and separators."""
NOT_OFFERED = {
    "adafactor": "Adafactor", "lion": "Lion", "lion8bit": "Lion", "pagedlion8bit": "Lion", "lamb": "LAMB",
    "adagrad": "Adagrad", "rmsprop": "RMSprop", "galore": "GaLore", "shampoo": "Shampoo", "soap": "SOAP",
}  # fmt: skip
"""What people ask for that no kind is, by its spelling without case and separators."""


def kind_of(text: str) -> str:
    """The kind that a name stands for, or the name. Raises ValueError for an optimizer that no kind is."""
    plain = "".join(letter for letter in text.lower() if letter.isalnum())
    if plain in NOT_OFFERED:
        raise ValueError(
            f"{NOT_OFFERED[plain]} is not among the optimizers; give one of your own with optimizer.kind=own "
            "and optimizer.factory, whose states are measured and not predicted, or adamw-8bit"
        )
    if plain.startswith("paged"):
        raise ValueError(
            "paged states, which move to host memory where the device is full, are not offered; "
            "adamw-8bit-bnb is bitsandbytes' without pages"
        )
    return SPELLINGS.get(plain, text)


class OptimizerSection(SettingsSection):
    """AdamW or another optimizer, every constant explicit."""

    kind: OptimizerKind = added_later("adamw")
    factory: Factory | None = factory_field(
        "an optimizer of `groups`, given by that name: a list of params, lr and weight_decay"
    )
    arguments: dict[str, Any] = arguments_field()
    newton_schulz: NewtonSchulz = added_later("fp32")
    learning_rate: pydantic.PositiveFloat = 0.001
    beta1: float = pydantic.Field(0.9, ge=0, lt=1)
    beta2: float = pydantic.Field(0.95, ge=0, lt=1)
    epsilon: pydantic.PositiveFloat = 1e-08
    momentum: float = added_later(0.0, ge=0, lt=1)
    weight_decay: pydantic.NonNegativeFloat = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    groups: list[GroupSection] = added_later([])
    implementation: OptimizerImplementation = added_later("default")

    @pydantic.field_validator("kind", mode="before")
    @classmethod
    def _as_spelled_elsewhere(cls, kind: object) -> object:
        return kind_of(kind) if isinstance(kind, str) else kind

    @pydantic.model_validator(mode="before")
    @classmethod
    def _factory_is_own(cls, values: Any) -> Any:
        has_factory = isinstance(values, dict) and values.get("factory") is not None
        return {"kind": "own", **values} if has_factory else values

    @pydantic.model_validator(mode="after")
    def _settings_take_effect(self) -> OptimizerSection:
        if (self.kind == "own") != (self.factory is not None):
            raise ValueError("`factory` and `kind: own` need each other; give both or neither")
        for key, kinds in EFFECTIVE.items():
            if self.kind not in kinds and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` would be ignored by `kind: {self.kind}`; leave it out")
        return self

    def update_groups(self, dimensions: Mapping[str, int]) -> tuple[UpdateGroup, ...]:
        """Groups of the trained parameters: those that decay, then the rest, then the same of each of
        `groups`; any may be empty.

        dimensions: of each trained parameter of the whole model, since shards lose theirs.
        """
        decaying = frozenset(name for name, count in dimensions.items() if self.decay == "all" or count >= 2)
        place = self.places(dimensions)
        found = []
        for index in (None, *range(len(self.groups))):
            names = frozenset(name for name in dimensions if place.get(name) == index)
            own = GroupSection.model_construct(parameters="*") if index is None else self.groups[index]
            decays = (self.weight_decay, 0.0) if own.weight_decay is None else (own.weight_decay,) * 2
            rate = (own.learning_rate or self.learning_rate) / self.learning_rate
            pair = zip((names & decaying, names - decaying), decays, strict=True)
            found += [UpdateGroup(names=part, weight_decay=decay, rate=rate) for part, decay in pair]
        return tuple(found)

    @property
    def freezes(self) -> bool:
        """Whether any of its groups keeps its values."""
        return any(group.frozen for group in self.groups)

    def places(self, names: Iterable[str]) -> dict[str, int]:
        """Which of `groups` a parameter is in, of those that are in any."""
        matching = ((n, i) for n in names for i, g in enumerate(self.groups) if fnmatchcase(n, g.parameters))
        return dict(reversed(list(matching)))

    def frozen_among(self, names: Iterable[str]) -> frozenset[str]:
        """The parameters that `groups` freeze. Raises JobError for a group without any parameter."""
        every = list(names)
        place = self.places(every)
        for index, group in enumerate(self.groups):
            if index not in place.values():
                matched = any(fnmatchcase(name, group.parameters) for name in every)
                why = (
                    "earlier groups have all that it matches" if matched else "it matches none of the model's"
                )
                raise JobError(
                    f"optimizer.groups: '{group.parameters}' has no parameters: {why}; names are like "
                    f"'{every[0]}' and '{every[-1]}'"
                )
        return frozenset(name for name, index in place.items() if self.groups[index].frozen)

    def for_closed_forms(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `Workload`; `single:states=fp32` has states of full width."""
        runs = self.at_full_width() if options.get("states") == "fp32" else self
        return {
            "optimizer": runs.kind,
            "newton_schulz": self.newton_schulz,
            "momentum": self.momentum,
            "optimizer_implementation": self.implementation,
        }

    @property
    def moments(self) -> int:
        """Values that the optimizer keeps per weight, as Adam keeps two."""
        return (1 if self.momentum else 0) if self.kind == "sgd" else 2

    @property
    def rounds_states(self) -> bool:
        """Whether the update itself rounds to fewer bits than the weights have."""
        return self.kind in LOW_BIT or self.newton_schulz == "bf16"

    def at_full_width(self) -> OptimizerSection:
        """Copy whose update does not round to fewer bits than the weights have."""
        kind: OptimizerKind = "adamw" if self.kind in LOW_BIT else self.kind
        return self.model_copy(update={"kind": kind, "newton_schulz": "fp32"})


class ScheduleSection(SettingsSection):
    """The learning rate over steps."""

    kind: Literal["constant", "linear", "cosine", "deepspeed"] = "cosine"
    warmup_steps: pydantic.NonNegativeInt = 2
    final_fraction: float = pydantic.Field(0.1, ge=0, le=1)
    scheduler: str | None = added_later(None)
    parameters: dict[str, Any] = added_later({})

    @pydantic.model_validator(mode="after")
    def _scheduler_takes_effect(self) -> ScheduleSection:
        if (self.scheduler is not None) != (self.kind == "deepspeed"):
            raise ValueError("`scheduler` and `kind: deepspeed` need each other; give both or neither")
        if self.parameters and self.scheduler is None:
            raise ValueError("`parameters` are those of `scheduler`, which is not given; leave them out")
        return self


Task = Literal["causal-lm", "seq2seq", "classification", "custom"]
DEFAULT_TASK: Task = "causal-lm"


def require_fitting(task: Task, model: ModelSection, data: DataSection, loss: LossSection) -> None:
    """Raise ValueError for data or a loss that the task does not have."""
    own_data = data.factory is not None
    if task == "causal-lm" and data.source in IMAGES:
        raise ValueError(f"data.source '{data.source}' has no text; set task to classification")
    if task == "seq2seq" and not own_data:
        if data.is_packed or (data.source != "squad" and data.prompt_field is None):
            raise ValueError(
                f"task seq2seq needs an input for each text: data.source {', '.join(ROWS)} with "
                "data.prompt_field, squad, or data.factory"
            )
    if task == "classification" and not own_data and data.source not in (*ROWS, *IMAGES):
        raise ValueError(
            f"task classification needs labels, which data.source '{data.source}' has not: use "
            f"{', '.join((*ROWS, *IMAGES))}, or data.factory"
        )
    if task == "classification" and data.is_tokenized and data.is_packed:
        raise ValueError("task classification is one sample per row; leave `data.packed` out")
    if task == "custom" and not own_data:
        raise ValueError("task custom needs `data.factory`: nothing else says what its samples are")
    if data.target_length is not None and task != "seq2seq":
        raise ValueError("`data.target_length` is of task seq2seq; it would be ignored")
    if (
        task != "custom"
        and loss.factory is None
        and loss.model_copy(update={"chunk_tokens": None}) != LossSection()
    ):
        raise ValueError(f"`loss` of task {task} is the task's own; give `loss.factory`, or leave it out")
    if task != "custom" and loss.targets != "samples":
        raise ValueError(f"`loss.targets` is of task custom; task {task} has its own")
    if task == "custom" and model.factory is None and loss.factory is None:
        raise ValueError("task custom needs `model.factory`, `loss.factory` or both")


DEFAULT_GLOBAL_BATCH_SIZE = 8
DEFAULT_STEPS = 20
NAMED_FILES = (("model", "name"), ("data", "path"), ("data", "tokenizer"))
"""Settings that name a local file or folder, or something of the Hugging Face hub."""
FACTORIES = (("model", "factory"), ("data", "factory"), ("loss", "factory"), ("optimizer", "factory"))
"""Settings that name a function of the user's own."""


_EVERY_SECOND = (
    "torchtitan keeps every second matrix product, which needs more than true and less than selective"
)
OTHER_CHECKPOINTING = {
    "op": _EVERY_SECOND,
    "selective-op": _EVERY_SECOND,
    "reentrant": "checkpointing (true) is not reentrant, which under FSDP1 keeps inputs of frozen blocks",
}
"""Checkpointing of other programs, and why it is none of ours."""


class TrainingSection(SettingsSection):
    """Batch, length, precision and randomness of the training."""

    steps: pydantic.PositiveInt | None = None
    epochs: pydantic.PositiveFloat | None = None
    global_batch_size: pydantic.PositiveInt | None = None
    micro_batch_size: pydantic.PositiveInt | None = None
    accumulation_steps: pydantic.PositiveInt | None = None
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp8"] = "fp32"
    gradient_clipping: pydantic.PositiveFloat | None = 1.0
    activation_checkpointing: bool | Annotated[str, pydantic.Field(pattern=PARTIAL_CHECKPOINTING)] = False
    initial_loss_scale: pydantic.PositiveFloat = 2.0**16
    loss_scale_growth_interval: pydantic.PositiveInt = 1000
    seed: pydantic.NonNegativeInt = pydantic.Field(0, lt=2**63)
    deterministic: bool = True
    tf32: bool = False

    @pydantic.field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _one_name_each(cls, value: Any) -> Any:
        """The words for true and false are those values, so that they are the same job."""
        if not isinstance(value, str):
            return value
        if value in OTHER_CHECKPOINTING:
            raise ValueError(f"{OTHER_CHECKPOINTING[value]}, so '{value}' is no setting")
        return {"none": False, "all": True, "every-1": True}.get(value, value)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`, not both")
        if self.initial_loss_scale.hex().split("p")[0] != "0x1.0000000000000":
            raise ValueError("`initial_loss_scale` must be a power of two")
        return self

    @property
    def held_precision(self) -> Precision:
        """Precision of all but products in fp8, which leave weights, states and traffic as fp32 has them."""
        return "fp32" if self.precision == "fp8" else self.precision


class EvaluationSection(SettingsSection):
    """Loss on samples that are held out of the training."""

    every_steps: pydantic.PositiveInt | None = None
    samples: pydantic.PositiveInt = 32
    answer_tokens: pydantic.PositiveInt | None = added_later(None)

    @pydantic.model_validator(mode="after")
    def _answers_are_held_out(self) -> EvaluationSection:
        if self.answer_tokens is not None and self.every_steps is None:
            raise ValueError("`answer_tokens` needs `every_steps`: without evaluations nothing is held out")
        return self


class Job(SettingsSection):
    """What is trained: everything that decides the mathematics, nothing of backend or machine."""

    task: Task = added_later(DEFAULT_TASK)
    model: ModelSection = ModelSection()
    adapter: AdapterSection = pydantic.Field(
        AdapterSection(), exclude_if=lambda adapter: not adapter.is_present
    )
    data: DataSection = DataSection()
    loss: LossSection = added_later(LossSection())
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _tokenizer_of_the_model(cls, document: Any) -> Any:
        """A model by name is fed what its own tokenizer makes of the text, unless another is named."""
        if not isinstance(document, dict):
            return document
        model, data = document.get("model"), document.get("data", {})
        name = model.get("name") if isinstance(model, dict) else getattr(model, "name", None)
        if not isinstance(name, str) or not isinstance(data, dict) or "tokenizer" in data:
            return document
        if data.get("factory") is not None or data.get("source") in IMAGES:
            return document
        return {**document, "data": {**data, "tokenizer": name}}

    @pydantic.model_validator(mode="after")
    def _sections_fit(self) -> Job:
        require_fitting(self.task, self.model, self.data, self.loss)
        if self.adapter.is_present and self.task not in ("causal-lm", "seq2seq"):
            raise ValueError(
                f"`adapter` on task {self.task} would leave a new head frozen at random weights; use task "
                "causal-lm or seq2seq, or train all weights"
            )
        chunks, answers = self.loss.chunk_tokens is not None, self.evaluation.answer_tokens
        if chunks and (self.task != DEFAULT_TASK or self.model.factory is not None):
            raise ValueError("`loss.chunk_tokens` needs task causal-lm and a model of transformers")
        if chunks and self.model.compile == "model":
            raise ValueError(
                "`loss.chunk_tokens` hands the output layer other labels in each step, for which a model is "
                "compiled anew; use `model.compile: block`"
            )
        if self.training.precision == "fp8" and (self.adapter.is_present or self.model.compile != "none"):
            raise ValueError(
                "`training.precision: fp8` excludes `adapter` and `model.compile`; leave them out"
            )
        if answers is not None and (self.data.source != "squad" or self.task != DEFAULT_TASK):
            raise ValueError(
                "`evaluation.answer_tokens` needs task causal-lm and `data.source: squad`: questions"
            )
        if answers is not None and answers >= self.data.sequence_length:
            raise ValueError("`evaluation.answer_tokens` must leave room for the question in a sequence")
        return self

    def why_whole(self, asked: AskedLoading) -> str | None:
        """What of the job has every rank build the whole model although `asked` is not 'full'; None: nothing.

        A model of the user's own may do so too (`rank.initial_weights`).
        """
        if asked == "slices" and self.adapter.is_quantised:
            return "bitsandbytes packs 4-bit weights from whole ones"
        return None

    def job_id(self, content_digests: dict[str, str] | None = None) -> str:
        """Hash of what is trained: 12 hexadecimal digits.

        Micro-batch and accumulation are left out: they split a global batch without changing it. So are the
        optimizer's implementation, which computes the same update, and deterministic kernels, which add in a
        fixed order. So call it on a job whose global batch is resolved. `content_digests` maps a local path
        or a factory in the job to the digest of the file there, so that the same data elsewhere is the same
        job.
        """
        document = self.model_dump(mode="json")
        for key in ("micro_batch_size", "accumulation_steps"):
            del document["training"][key]
        document["optimizer"].pop("implementation", None)
        document["training"]["deterministic"] = True
        for section, key in (*NAMED_FILES, *FACTORIES):
            digest = (content_digests or {}).get(str(document.get(section, {}).get(key)))
            if digest is not None:
                document[section][key] = digest
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def axes_of(job: Job) -> list[str]:
    """Settings of how a step is computed that differ from a plain one: 'model.compile=block'."""
    plain: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("model.compile", job.model.compile, ("none",)),
        ("optimizer.kind", job.optimizer.kind, ("adamw",)),
        ("optimizer.groups", [group.parameters for group in job.optimizer.groups], ([],)),
        ("training.precision", job.training.precision, ("fp32", "bf16-mixed", "fp16-mixed", "bf16")),
        ("data.document_attention", job.data.document_attention, ("across",)),
        ("loss.chunk_tokens", job.loss.chunk_tokens, (None,)),
        ("training.activation_checkpointing", job.training.activation_checkpointing, (False, True)),
    )
    return [f"{name}={value}" for name, value, of_plain in plain if value not in of_plain]
