"""What a job trains: its model, adapter and loss; and what all sections of a configuration share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from harness.backends.base import Compile
from harness.backends.refusals import TypedValues


class SettingsSection(TypedValues):
    """A part of a configuration: frozen, unknown keys refused."""


def later_setting(default: Any, **of: Any) -> Any:
    """A field that documents of jobs leave out while it has its default: earlier jobs' stay as they are."""
    return Field(default, exclude_if=lambda value: value == default, **of)


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


Factory = Annotated[str, AfterValidator(_checked)]


def factory_field(makes: str) -> Any:
    """An optional factory, left out of documents of jobs without one. `makes`: what it returns."""
    return later_setting(
        None,
        description=f"module:function of your own that returns {makes}; looked for in the file's folder, the "
        "working directory and among installed packages",
    )


def arguments_field() -> Any:
    """Keyword arguments of that factory."""
    return later_setting({}, description="keyword arguments of `factory`")


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

    name: str | None = Field(None, description="Hugging Face hub name or local folder; excludes `config`")
    revision: str | None = Field(None, description="hub revision of `name`")
    weights: Literal["pretrained", "random"] | None = Field(
        None,
        description="with `name`: its weights (pretrained, the default) or random ones from the seed",
    )
    trust_remote_code: bool = later_setting(
        False,
        description="with `name`: run the Python code that its folder or repository brings, with your rights "
        "on every rank; read it first, and pin `revision` of a hub's",
    )
    config: dict[str, Any] | None = Field(
        None,
        description=(
            "values of the Hugging Face configuration. With `model_type` they stand on that type's "
            "defaults; without it they change the default small Llama. `vocab_size` defaults to the "
            "tokenizer's"
        ),
    )
    factory: Factory | None = factory_field("the model, an `nn.Module`; excludes `name` and `config`")
    arguments: dict[str, Any] = arguments_field()
    block_class: str | None = later_setting(
        None,
        description="class of the modules that FSDP wraps as one unit each; several separated by commas. "
        "Default: what a Hugging Face model declares, else the class repeated in the largest `ModuleList` or "
        "`Sequential`; without one, or with the model's own class, the whole model is one unit",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="attention kernel; auto: sdpa where the architecture has it, else eager"
    )
    dropout: float | None = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability written to every dropout of the model; null: as the model has it",
    )
    compile: Compile = later_setting(
        "none",
        description="torch.compile: of each block (block), of the whole model as the strategy wraps it "
        "(model; DeepSpeed: `engine.compile()`), or not at all",
    )

    @model_validator(mode="after")
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

    kind: Literal["none", "lora"] = Field(
        "none", description="none: all weights are trained; lora: low-rank adapters on a frozen model"
    )
    rank: PositiveInt = Field(8, description="rank of each adapter")
    alpha: PositiveFloat = Field(16.0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropout before each adapter")
    targets: list[str] | None = Field(
        None,
        description="names, or ends of names, of the linear layers that get an adapter; [all-linear] for all "
        "but the output layer. Default: peft's choice for the model's type",
    )
    base_dtype: Literal["fp32", "bf16", "nf4"] | None = Field(
        None,
        description="dtype of frozen weights where the library does not cast them. Default: as "
        "`training.precision` has the weights of a job without adapter. nf4: linear layers in 4 bits (QLoRA)",
    )

    @model_validator(mode="after")
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
    reduction: Literal["sum", "mean"] = Field(
        "mean",
        description="what that function, or the model's own loss in task custom, returns of a batch: the sum "
        "over its targets or their mean",
    )
    targets: Literal["samples", "labels"] = Field(
        "samples",
        description="task custom: what the loss of a step is the mean over: samples, or labels that are not "
        "-100. Other tasks: labels of text, samples of classes",
    )

    chunk_tokens: PositiveInt | None = later_setting(
        None,
        description="task causal-lm: tokens whose logits are computed at once, and once more in the backward "
        "pass, for large vocabularies; null: those of all tokens",
    )

    @model_validator(mode="after")
    def _arguments_are_used(self) -> LossSection:
        if self.arguments and self.factory is None:
            raise ValueError("`arguments` need a `factory`")
        if self.chunk_tokens is not None and self.factory is not None:
            raise ValueError("`chunk_tokens` would be ignored by a `factory`; remove one of them")
        return self
