"""The model of a job."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from harness.backends.base import Compile
from harness.spec.factory import Factory, arguments_field, factory_field
from harness.spec.section import Section

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


class ModelSection(Section):
    """The model: a checkpoint by name or path, a configuration with random weights, or your own module."""

    name: str | None = Field(None, description="Hugging Face hub name or local folder; excludes `config`")
    revision: str | None = Field(None, description="hub revision of `name`")
    weights: Literal["pretrained", "random"] | None = Field(
        None,
        description="with `name`: its weights (pretrained, the default) or random ones from the seed",
    )
    trust_remote_code: bool = Field(
        False,
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: not value,
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
    block_class: str | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="class of the modules that FSDP wraps as one unit each; several separated by commas. "
        "Default: what a Hugging Face model declares, else the class repeated in the largest `ModuleList` or "
        "`Sequential`",
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
    compile: Compile = Field(
        "none",
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value == "none",
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
